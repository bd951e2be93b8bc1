"""Ways of calling an attached model beyond a single forward or generate: memory, padding, caches, threads, copies."""

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from peak_memory import Peak
from tiny_models import FAMILIES, PATCHES, Load, make_image, prepare
from torch import Tensor
from transformers import modeling_utils, pipeline

from clustrs import ClustRS, DivPrune, FasterVLM, Pruner, Random

pytestmark = pytest.mark.usefixtures("as_published")

TEXT = "<s>user: <image> what is it?"
GREEDY: dict[str, Any] = {"do_sample": False, "suppress_tokens": [4, 5]}
"""Untrained models like to say <image>, which nobody could ask about afterwards."""


def ask(processor: Any, text: str = TEXT, **shape: int) -> dict[str, Any]:
    return prepare(processor, [text], [[make_image(**shape)]])


def new_tokens(model: Any, inputs: dict[str, Any], count: int = 6, **more: Any) -> Tensor:
    out: Tensor = model.generate(**inputs, max_new_tokens=count, **GREEDY, **more)
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.fixture
def few_objects() -> Iterator[None]:
    """The collector leaves what was there before aside: going through all of it takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def graphs() -> Iterator[Tensor]:
    """Tensors with a graph behind them that somebody still holds."""
    gc.collect()
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.grad_fn is not None:
            yield thing


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_keeps_no_graph(load: Load, family: str) -> None:
    model, processor = load(family)
    inputs = ask(processor)
    heard: list[bool] = []
    hook = model.model.vision_tower.register_forward_hook(lambda *_: heard.append(torch.is_grad_enabled()))
    with ClustRS(keep=4)(model) as handle:
        model.generate(**inputs, max_new_tokens=2)
        assert heard == [False], "the tower runs without gradients"
        assert list(graphs()) == []
        model(**inputs)
        assert heard == [False, True], "training through forward keeps its gradients"
        assert list(graphs()) == [], "what the handle holds is detached"
        assert not handle.last[0].selection.tokens.requires_grad
    hook.remove()


def test_generate_costs_no_more_memory_than_unpruned(load: Load) -> None:
    """Bytes of all tensors alive at the peak: a graph behind the tower would hold all of its activations."""
    model, processor = load()
    inputs = ask(processor)

    def peak(pruned: bool) -> int:
        with Peak() as seen:
            if pruned:
                with ClustRS(keep=4)(model):
                    model.generate(**inputs, max_new_tokens=2, **GREEDY)
            else:
                model.generate(**inputs, max_new_tokens=2, **GREEDY)
        return seen.most

    for _ in range(2):  # the first calls set up what stays
        plain, pruned = peak(False), peak(True)
    assert pruned <= plain * 1.02, f"{pruned} bytes at the peak, {plain} without pruning"


def test_padding_that_no_prompt_needs_goes(load: Load) -> None:
    """A prompt with one image and one with two: as wide as the longer of the two that are left."""
    model, processor = load()
    texts = ["<s>a <image> what?", "<s>b <image> and <image> what?"]
    inputs = prepare(processor, texts, [[make_image()], [make_image(seed=1), make_image(seed=2)]])
    widths: list[int] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    text = [
        int((ids[mask.bool()] != model.config.image_token_id).sum())
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    with torch.no_grad(), ClustRS(keep=3)(model):
        model(**inputs)
        model.generate(**inputs, max_new_tokens=1)
    hook.remove()
    assert widths == [max(text[0] + 3, text[1] + 6)] * 2
    assert inputs["input_ids"].shape[1] == text[1] + 2 * PATCHES


@pytest.mark.parametrize("again", [False, True], ids=["ids alone", "with pixels again"])
@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_with_the_cache(load: Load, family: str, positions: Any, again: bool) -> None:
    model, processor = load(family)
    inputs = ask(processor)
    more = torch.randint(10, 200, (1, 7), generator=torch.Generator().manual_seed(0))
    with ClustRS(keep=5)(model, positions=positions) as handle:
        first = model.generate(**inputs, max_new_tokens=5, **GREEDY, return_dict_in_generate=True)
        selected = handle.last
        ids = torch.cat([first.sequences, more], 1)
        longer = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = new_tokens(model, longer)
        turn = longer if again else {"input_ids": ids, "attention_mask": longer["attention_mask"]}
        second = model.generate(
            **turn,
            past_key_values=first.past_key_values,
            max_new_tokens=6,
            **GREEDY,
            return_dict_in_generate=True,
        )
        assert torch.equal(second.sequences[:, : ids.shape[1]], ids)
        assert torch.equal(second.sequences[:, ids.shape[1] :], expected)
        third = torch.cat([second.sequences, more[:, :3]], 1)
        cacheless = new_tokens(model, {**inputs, "input_ids": third, "attention_mask": torch.ones_like(third)}, 4)
        assert torch.equal(
            model.generate(third, past_key_values=second.past_key_values, max_new_tokens=4, **GREEDY)[
                :, third.shape[1] :
            ],
            cacheless,
        )
        assert len(selected) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_of_a_padded_batch(load: Load, family: str) -> None:
    model, processor = load(family)
    texts = ["<s>user: <image> what?", "<s>user: <image> and what may that one be?"]
    inputs = prepare(processor, texts, [[make_image()], [make_image(30, 70, 1)]])
    more = torch.randint(10, 200, (2, 4), generator=torch.Generator().manual_seed(0))
    with ClustRS(keep=5)(model):
        first = model.generate(**inputs, max_new_tokens=3, **GREEDY, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 7, dtype=torch.long)], 1)
        expected = new_tokens(model, {**inputs, "input_ids": ids, "attention_mask": mask})
        cached = {"input_ids": ids, "attention_mask": mask, "past_key_values": first.past_key_values}
        assert torch.equal(new_tokens(model, cached), expected)


def test_caches_that_do_not_fit(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor)
    with ClustRS(keep=5)(model):
        out = model.generate(**inputs, max_new_tokens=3, **GREEDY, return_dict_in_generate=True)
        other = out.sequences.clone()
        other[0, 1] += 1
        with pytest.raises(ValueError, match="must begin with the one that the cache was made with"):
            model.generate(other, past_key_values=out.past_key_values, max_new_tokens=2)
        image = torch.cat([out.sequences, torch.full((1, 1), model.config.image_token_id)], 1)
        with pytest.raises(ValueError, match="a new image can't be added"):
            model.generate(image, past_key_values=out.past_key_values, max_new_tokens=2)
    unpruned = model(**inputs, use_cache=True).past_key_values
    with ClustRS(keep=5)(model), pytest.raises(ValueError, match="past_key_values: images can't be added"):
        model.generate(**inputs, past_key_values=unpruned, max_new_tokens=2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", ["mask", "mask and positions"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoding_loop_of_ones_own(load: Load, family: str, given: str, side: str) -> None:
    """Prefill, then steps with the caller's mask, which knows nothing of pruning: each row as if it were alone."""
    model, processor = load(family)
    processor.tokenizer.padding_side = side
    texts = ["<s>user: <image> what?", "<s>user: <image> and <image> what may that one be?"]
    images = [[make_image()], [make_image(30, 70, 1), make_image(50, 50, 2)]]
    inputs = prepare(processor, texts, images)
    if family == "llava_onevision":
        inputs["batch_num_images"] = torch.tensor([1, 2])
    with torch.no_grad(), ClustRS(keep=5)(model):
        found = loop(model, inputs, given == "mask and positions")
        for i in range(2):
            alone = prepare(processor, [texts[i]], [images[i]])
            if family == "llava_onevision":
                alone["batch_num_images"] = torch.tensor([len(images[i])])
            if side == "left" or given == "mask and positions":
                assert found[i] == new_tokens(model, alone, 5)[0].tolist()
            else:  # without positions a model counts the padding in between, pruned or not
                assert found[i][0] == new_tokens(model, alone, 5)[0, 0]


def loop(model: Any, inputs: dict[str, Any], with_positions: bool) -> list[list[int]]:
    """Five greedy tokens of each row."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(**inputs, use_cache=True, **({"position_ids": positions} if with_positions else {}))
    width = out.logits.shape[1]
    lengths = mask.sum(1) - mask.shape[1] + width if mask[:, -1].all() else None
    ends = [width - 1] * len(mask) if lengths is not None else last_columns(model, inputs, width)
    token = pick(out.logits[range(len(mask)), ends])
    found = [token]
    position = positions.max(1, keepdim=True).values
    for _ in range(4):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        position = position + 1
        more = {"position_ids": position} if with_positions else {}
        out = model(
            input_ids=token[:, None], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True, **more
        )
        token = pick(out.logits[:, -1])
        found.append(token)
    return torch.stack(found, 1).tolist()


def pick(logits: Tensor) -> Tensor:
    logits[:, GREEDY["suppress_tokens"]] = -torch.inf
    return logits.argmax(-1)


def last_columns(model: Any, inputs: dict[str, Any], width: int) -> list[int]:
    """Where the prompts end after pruning to 5 tokens per image, padded on the right."""
    ends = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        real = ids[mask.bool()]
        text = int((real != model.config.image_token_id).sum())
        ends.append(text - 1)
    images = [5, 10]
    ends = [end + kept for end, kept in zip(ends, images, strict=True)]
    assert max(ends) == width - 1
    return ends


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_to_keep_as_positions(load: Load, family: str) -> None:
    model, processor = load(family)
    inputs = ask(processor)
    width = inputs["input_ids"].shape[1]
    with torch.no_grad(), ClustRS(keep=4)(model) as handle:
        whole = model(**inputs).logits
        wanted = torch.tensor([0, 2, width - 2, width - 1])
        expected = whole[:, [0, 2, whole.shape[1] - 2, whole.shape[1] - 1]]
        torch.testing.assert_close(model(**inputs, logits_to_keep=wanted).logits, expected)
        torch.testing.assert_close(model(**inputs, logits_to_keep=2).logits, whole[:, -2:])
        if hasattr(modeling_utils, "slice_logits_to_keep"):  # older models take positions for all rows alone
            torch.testing.assert_close(model(**inputs, logits_to_keep=wanted[None]).logits, expected)
            chosen = torch.zeros(1, width, dtype=torch.bool)
            chosen[0, wanted] = True
            torch.testing.assert_close(model(**inputs, logits_to_keep=chosen).logits, expected[0])
        start = int((inputs["input_ids"][0] == model.config.image_token_id).nonzero()[0])
        kept = set(handle.last[0].selection.indices.tolist())
        gone = start + next(i for i in range(PATCHES) if i not in kept)
        with pytest.raises(ValueError, match="a visual token that was dropped"):
            model(**inputs, logits_to_keep=torch.tensor([gone]))
        with pytest.raises(ValueError, match="logits_to_keep must be positions from 0 to"):
            model(**inputs, logits_to_keep=torch.tensor([width]))


def test_logits_to_keep_in_a_padded_batch(load: Load) -> None:
    model, processor = load()
    texts = ["<s>a <image> what?", "<s>b <image> and <image> what?"]
    inputs = prepare(processor, texts, [[make_image()], [make_image(seed=1), make_image(seed=2)]])
    width = inputs["input_ids"].shape[1]
    with torch.no_grad(), ClustRS(keep=3)(model):
        whole = model(**inputs).logits
        some = model(**inputs, logits_to_keep=torch.tensor([width - 3, width - 1])).logits
    torch.testing.assert_close(some, whole[:, [-3, -1]])


def test_assisted_decoding_is_refused(load: Load) -> None:
    model, processor = load()
    assistant, _ = load()
    with ClustRS(keep=4)(model), pytest.raises(ValueError, match="assistant_model: assisted decoding is not supported"):
        model.generate(**ask(processor), assistant_model=assistant, max_new_tokens=4)


def test_prompt_lookup_gives_the_same_tokens(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor, "<s>one two one two <image> one two one")
    with ClustRS(keep=4)(model):
        assert torch.equal(new_tokens(model, inputs, prompt_lookup_num_tokens=2), new_tokens(model, inputs))


def test_a_forward_set_later_stays(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor)
    calls: list[str] = []
    handle = ClustRS(keep=4).attach(model)
    ours = model.forward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return ours(*args, **kwargs)

    model.forward = theirs
    handle.remove()
    assert model.__dict__["forward"] is theirs
    with torch.no_grad():
        logits = model(**inputs).logits
    assert calls == ["theirs"]
    assert logits.shape[1] == inputs["input_ids"].shape[1], "what still holds our forward no longer prunes"


def test_accelerate_hooks_removed_later(load: Load) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, processor = load()
    inputs = ask(processor)
    handle = ClustRS(keep=4).attach(model)
    hooks.add_hook_to_module(model, hooks.ModelHook())
    with torch.no_grad():
        assert model(**inputs).logits.shape[1] < inputs["input_ids"].shape[1]
        handle.remove()
        hooks.remove_hook_from_module(model)
        assert model(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_on_one_model(load: Load, family: str) -> None:
    """Answers, and what the handle says was kept, are those of the thread's own call."""
    model, processor = load(family)
    calls = [ask(processor, "<s>user: <image> what?" + " and" * i, height=30 + 8 * i, seed=i) for i in range(6)]
    expected = []
    with ClustRS(keep=5)(model) as handle:
        for inputs in calls:
            tokens = new_tokens(model, inputs).tolist()
            expected.append((tokens, handle.last[0].selection.indices.tolist(), handle.last[0].placeholders))
        wrong: list[Any] = []

        def work(i: int) -> None:
            try:
                for _ in range(3):
                    tokens = new_tokens(model, calls[i]).tolist()
                    found = (tokens, handle.last[0].selection.indices.tolist(), handle.last[0].placeholders)
                    if found != expected[i]:
                        wrong.append((i, found))
            except Exception as error:
                wrong.append((i, error))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert handle.last[0].placeholders == expected[-1][2], "this thread's own last call"


def test_a_call_in_another_thread_can_be_seen_here(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor)
    with ClustRS(keep=5)(model) as handle:
        thread = threading.Thread(target=new_tokens, args=(model, inputs))
        thread.start()
        thread.join()
        assert handle.last[0].kept == 5


def test_a_deep_copy_is_independent(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor)
    with torch.no_grad(), ClustRS(keep=5)(model) as handle:
        expected = model(**inputs).logits
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(model(**inputs).logits, expected)
        changed = twin(**inputs).logits
        assert changed.shape == expected.shape, "it prunes as the original does"
        assert float(changed.abs().max()) == 0, "with its own weights"
        assert twin._clustrs_handle is not handle
        twin._clustrs_handle.remove()
        assert twin(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
        assert model(**inputs).logits.shape == expected.shape
    plain = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)


def test_attach_to_a_pipeline(load: Load) -> None:
    model, processor = load()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    with ClustRS(keep=4)(pipe) as handle:
        pipe(images=make_image(), text="<s>user: <image> what?", max_new_tokens=2, do_sample=False)
    assert handle.model is model
    assert handle.last[0].kept == 4


def test_repr(load: Load) -> None:
    model, _ = load()
    handle = DivPrune(keep=7).attach(model, scope="crop")
    assert repr(handle) == (
        "<Handle: DivPrune(keep=7) attached to LlavaForConditionalGeneration, "
        "scope='crop', crops='all', positions='compact', attention='plain'>"
    )
    handle.remove()
    assert "removed from" in repr(handle)


def test_survivors_keep_their_own_placeholders(load: Load) -> None:
    """Ids, labels and token types are those of the columns that stay."""
    model, processor = load()
    inputs = ask(processor)
    width = inputs["input_ids"].shape[1]
    seen: dict[str, Tensor] = {}
    original = model.loss_function
    model.loss_function = lambda logits, labels, **_: seen.update(labels=labels) or logits.sum()
    with torch.no_grad(), Random(keep=4)(model) as handle:
        model(**inputs, labels=torch.arange(width)[None])
    model.loss_function = original
    start = int((inputs["input_ids"][0] == model.config.image_token_id).nonzero()[0])
    kept = [start + i for i in handle.last[0].selection.indices.tolist()]
    assert seen["labels"][0].tolist() == [*range(start), *kept, *range(start + PATCHES, width)]


def test_ready_made_features_are_refused(load: Load) -> None:
    model, processor = load()
    inputs = ask(processor)
    features = model.model.get_image_features(pixel_values=inputs.pop("pixel_values"), return_dict=True)
    with (
        ClustRS(keep=4)(model),
        pytest.raises(ValueError, match="mm_encoder_outputs must be None while a method is attached"),
    ):
        model(**inputs, mm_encoder_outputs={"image": features})


@pytest.mark.graphs
@pytest.mark.parametrize(("method", "backend"), [(ClustRS(keep=5), "aot_eager"), (FasterVLM(keep=5), "inductor")])
def test_compiled_forward_in_one_graph(load: Load, method: Pruner, backend: str) -> None:
    """The whole pruned forward without a graph break; tests/pruners compile each selection with the default backend."""
    model, processor = load()
    options = {}
    if backend == "inductor":  # each layer less is a few kernels less to compile
        options = {"positions": "original", "attention": "proportional"}
        config = copy.deepcopy(model.config)
        config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers = 1, 2
        shallow = type(model)(config).eval()
        assert not shallow.load_state_dict(model.state_dict(), strict=False).missing_keys
        model = shallow
    inputs = ask(processor)
    text = int((inputs["input_ids"] != model.config.image_token_id).sum())
    with torch.no_grad(), method(model, **options) as handle:
        expected = model(**inputs).logits
        kept = handle.last[0].selection.indices
        compiled = torch.compile(model, fullgraph=True, backend=backend)(**inputs).logits
    assert compiled.shape[1] == text + 5
    torch.testing.assert_close(compiled, expected, atol=1e-4, rtol=1e-4)
    assert oracle.select(model, method, inputs, True).indices.tolist() == kept.tolist()
    torch._dynamo.reset()
