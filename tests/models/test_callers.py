"""Code of the caller that looks at token ids or at the cache, in every family: it finds the prompt that was given."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import BUILDERS, family_inputs, make_image
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from clustrs import ClustRS, NoPruning

pytestmark = pytest.mark.usefixtures("as_published")

EACH = pytest.mark.parametrize("family", BUILDERS)
TEXTS = ["IMAGE what is it?", "IMAGE and why, if one may ask?"]
LoadFamily = Callable[[str], tuple[Any, Any]]


class Seen:
    """Notes the ids that it is called with."""

    def __init__(self, prompt: Tensor) -> None:
        self.prompt = prompt
        self.seen: list[Tensor] = []

    def check(self) -> None:
        """Every row begins with its prompt."""
        assert self.seen
        for ids in self.seen:
            rows = self.prompt.repeat_interleave(len(ids) // len(self.prompt), 0)
            assert torch.equal(ids[:, : rows.shape[1]], rows)


class Processor(Seen, LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids)
        return scores


class StopAfterTwo(Seen, StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids)
        return torch.full((len(input_ids),), input_ids.shape[1] - self.prompt.shape[1] >= 2)


def batch(load_family: LoadFamily, family: str) -> tuple[Any, dict[str, Any]]:
    model, processor = load_family(family)
    images = [make_image(), make_image(60, 40, 1)]
    return model, family_inputs(model, processor, TEXTS, images)


@torch.no_grad()
def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False, **options})


@EACH
def test_criteria_processors_and_prefixes_see_the_callers_prompt(load_family: LoadFamily, family: str) -> None:
    """In a padded batch, alone and with beams; a criterion that counts from the prompt stops after two tokens."""
    model, inputs = batch(load_family, family)
    prompt = inputs["input_ids"]
    for options in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        processor, criterion = Processor(prompt), StopAfterTwo(prompt)
        prefixes: list[tuple[int, Tensor]] = []

        def allowed(row: int, ids: Tensor, seen: list[Any] = prefixes) -> list[int]:
            seen.append((row, ids))
            return list(range(20, 40))

        with ClustRS(keep=5)(model):
            out = generate(
                model,
                inputs,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([criterion]),
                prefix_allowed_tokens_fn=allowed,
                **options,
            )
        processor.check()
        criterion.check()
        assert out.shape[1] == prompt.shape[1] + 2
        assert all(torch.equal(ids[: prompt.shape[1]], prompt[row]) for row, ids in prefixes)
        assert bool(((out[:, prompt.shape[1] :] >= 20) & (out[:, prompt.shape[1] :] < 40)).all())


@EACH
def test_settings_of_transformers_mean_what_they_mean_without_pruning(load_family: LoadFamily, family: str) -> None:
    """With all tokens kept the tokens are those of the plain model; with few kept, what is forbidden is the same."""
    model, inputs = batch(load_family, family)
    prompt = inputs["input_ids"]
    settings = {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.2,
        "bad_words_ids": [[21, 22], [23]],
        "min_new_tokens": 3,
        "forced_eos_token_id": 30,
        "pad_token_id": 0,
    }
    plain = generate(model, inputs, **settings)
    with NoPruning()(model):
        assert torch.equal(generate(model, inputs, **settings), plain)
    forbidden = []
    for method in (NoPruning(), ClustRS(keep=3)):
        with method(model):
            out = generate(
                model,
                inputs,
                max_new_tokens=1,
                no_repeat_ngram_size=1,
                return_dict_in_generate=True,
                output_scores=True,
            )
        forbidden.append(out.scores[0].isinf())
    assert torch.equal(*forbidden)
    assert all(bool(forbidden[1][row, prompt[row]].all()) for row in range(2))


def test_a_length_criterion_of_the_caller_counts_the_callers_prompt(load_family: LoadFamily) -> None:
    """It takes the place of the one that transformers builds, and that one's rules hold."""
    model, inputs = batch(load_family, "llava")
    total = inputs["input_ids"].shape[1] + 3
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=total)])
    with ClustRS(keep=5)(model):
        assert generate(model, inputs, stopping_criteria=criteria, max_new_tokens=20).shape[1] == total


def test_processors_of_a_second_turn_see_the_longer_prompt(load_family: LoadFamily) -> None:
    model, inputs = batch(load_family, "llava")
    with ClustRS(keep=5)(model):
        first = generate(model, inputs, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.full((2, 3), 40)], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, longer.shape[1] - inputs["input_ids"].shape[1])], 1)
        recorder = Processor(longer)
        asked = {"input_ids": longer, "attention_mask": mask.long(), "past_key_values": first.past_key_values}
        generate(model, asked, logits_processor=LogitsProcessorList([recorder]))
    recorder.check()


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))  # noqa: S301


@EACH
def test_a_copied_cache_continues_as_the_cache_itself(load_family: LoadFamily, family: str) -> None:
    """Deep copies and pickles of the cache, and a cache that another attachment made."""
    model, inputs = batch(load_family, family)
    placeholders = [getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    text_only = [token for token in placeholders if token is not None]
    with ClustRS(keep=5)(model):
        first = generate(model, inputs, return_dict_in_generate=True, suppress_tokens=text_only)
        more = first.sequences.shape[1] + 3 - inputs["input_ids"].shape[1]
        longer = torch.cat([first.sequences, torch.full((2, 3), 40)], 1)
        asked = {"input_ids": longer}
        for name, value in (("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
            if name in inputs:
                asked[name] = torch.nn.functional.pad(inputs[name], (0, more), value=value)
        copies = [make(first.past_key_values) for make in (copy.deepcopy, copy.deepcopy, pickled)]
        expected = generate(model, asked, past_key_values=first.past_key_values)
        for made in copies[1:]:
            assert isinstance(made, type(first.past_key_values))
            assert torch.equal(generate(model, asked, past_key_values=made), expected)
    with ClustRS(keep=4)(model):
        assert torch.equal(generate(model, asked, past_key_values=copies[0]), expected)


@EACH
def test_rows_of_a_cache_are_followed(load_family: LoadFamily, family: str) -> None:
    """In a decoding loop on a padded batch: reordered, repeated and selected rows give the logits of those rows."""
    model, inputs = batch(load_family, family)
    changes: list[tuple[Callable[[Any], None], list[int]]] = [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ]
    if family.startswith("qwen3_5"):  # linear layers can only be reordered
        changes = changes[:1]
    with torch.no_grad(), ClustRS(keep=5)(model):
        for change, rows in changes:
            cache = model(**inputs).past_key_values
            kept = copy.deepcopy(cache)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
            token = torch.tensor([[41], [42]])
            expected = model(input_ids=token, attention_mask=mask, past_key_values=kept).logits
            change(cache)
            step = {"input_ids": token[rows], "attention_mask": mask[rows], "past_key_values": cache}
            torch.testing.assert_close(model(**step).logits, expected[rows], rtol=1e-4, atol=1e-4)


def test_a_cropped_cache(load_family: LoadFamily) -> None:
    """Text after the images can be cropped; images cannot, and lengths of the whole prompt are refused."""
    model, processor = load_family("llava")
    inputs = family_inputs(model, processor, ["IMAGE what is it?"], [make_image()])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), ClustRS(keep=5)(model):
        whole = model(**inputs)
        shorter = model(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], pixel_values=inputs["pixel_values"])
        cache = whole.past_key_values
        cache.crop(-2)
        assert cache.get_seq_length() == shorter.past_key_values.get_seq_length()
        for step in (cache, shorter.past_key_values):
            out = model(input_ids=ids[:, -2:], attention_mask=mask, past_key_values=step)
            torch.testing.assert_close(out.logits[:, -1], whole.logits[:, -1], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="crop must leave the images"):
            cache.crop(-(cache.get_seq_length() - 2))
        with pytest.raises(ValueError, match="crop must get a negative number"):
            cache.crop(3)


def test_rows_changed_in_another_way_are_refused(load_family: LoadFamily) -> None:
    model, inputs = batch(load_family, "llava")
    with torch.no_grad(), ClustRS(keep=5)(model):
        cache = model(**inputs).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:1], layer.values[:1]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        with pytest.raises(ValueError, match="past_key_values has 1 rows, expected 2"):
            model(input_ids=torch.tensor([[41]]), attention_mask=mask[:1], past_key_values=cache)


def test_a_cache_that_is_given_and_not_returned_is_recognized(load_family: LoadFamily) -> None:
    """Also after it was reset: then it holds nothing and takes a new image."""
    from transformers import DynamicCache

    model, processor = load_family("llava")
    inputs = family_inputs(model, processor, ["IMAGE what is it?"], [make_image()])
    with ClustRS(keep=5)(model):
        cache = DynamicCache(config=model.config)
        out = generate(model, inputs, past_key_values=cache)
        longer = torch.cat([out, torch.full((1, 3), 40)], 1)
        expected = generate(model, {"input_ids": longer, "pixel_values": inputs["pixel_values"]})
        again = generate(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, past_key_values=cache)
        assert torch.equal(again, expected)
        cache.reset()
        assert torch.equal(generate(model, inputs, past_key_values=cache), out)


def test_an_attached_model_is_not_pickled(load_family: LoadFamily) -> None:
    model, _ = load_family("llava")
    with ClustRS(keep=5)(model):
        for save in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
            with pytest.raises(TypeError, match=r"cannot be pickled: call handle.remove\(\) first"):
                save()
        torch.save(model.state_dict(), io.BytesIO())
    torch.save(model, io.BytesIO())
