"""What Gemma 3, PaliGemma and PaliGemma 2 have in common, against pruning by hand on models of the real classes."""

from typing import Any

import pytest
import torch
from drawn_cells import Marked, lit_cells
from PIL import Image, ImageDraw
from tiny_models import make_image
from tiny_models.gemma import (
    CELLS,
    GRID,
    KINDS,
    PATCH,
    Oracle,
    batch,
    load,
    prompt,
    question,
    saved,
)
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from clustrs import ClustRS, FasterVLM, NoPruning, Pruner, VisionZip, get_method, list_methods
from clustrs.models import ask as sharing
from clustrs.models.ask import as_seen, ask, chat_prompt

PRUNING = [name for name in list_methods("encoder") if name != "none"]
CLOSE: dict[str, Any] = {"atol": 3e-5, "rtol": 0.0}
WAYS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 2.0},
    {"cache_implementation": "static"},
]
pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.usefixtures("as_published")]


def one_image(processor: Any, kind: str, **shape: int) -> dict[str, Any]:
    return prompt(processor, question(kind), [make_image(**shape)])


def new_tokens(model: Any, inputs: dict[str, Any], count: int = 5, **way: Any) -> Tensor:
    torch.manual_seed(0)
    options = {"do_sample": False, "suppress_tokens": list(range(8)), **way}
    out: Tensor = model.generate(**inputs, max_new_tokens=count, **options)
    return out[:, inputs["input_ids"].shape[1] :]


def by_hand(
    oracle: Oracle, method: Pruner, inputs: dict[str, Any], original: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The compacted ids, token types, rows and positions of one prompt, whose images have a crop each."""
    ids, types = inputs["input_ids"][0], inputs["token_type_ids"][0]
    chosen = [oracle.select(method, pixels[None]) for pixels in inputs.get("pixel_values", [])]
    kept = []
    for selection in chosen:
        indices = selection.indices.tolist()
        kept.append(indices if indices == sorted(indices) else list(range(len(indices))))
    columns = torch.tensor(oracle.columns(ids, kept))
    first = 0 if oracle.gemma3 else 1
    positions = first + (columns if original else torch.arange(len(columns)))
    rows = torch.cat([selection.tokens for selection in chosen]) if chosen else None
    return ids[columns], types[columns], rows, positions


def test_keeping_everything_is_bit_identical(kind: str) -> None:
    model, processor = load(kind)
    inputs = batch([one_image(processor, kind), prompt(processor, question(kind, "?"), [make_image(30, 30, 1)])])
    with torch.no_grad():
        expected = model(**inputs).logits
        told = new_tokens(model, inputs)
        for name in list_methods("encoder"):
            method = get_method(name) if name == "none" else get_method(name, keep=1000)
            with method(model):
                assert torch.equal(model(**inputs).logits, expected), name
        with ClustRS(keep=1.0)(model):
            assert torch.equal(new_tokens(model, inputs), told)


@pytest.mark.parametrize("name", PRUNING)
def test_logits_are_those_of_pruning_by_hand(kind: str, name: str) -> None:
    model, processor = load(kind)
    inputs, method, oracle = one_image(processor, kind), get_method(name, keep=5), Oracle(model)
    expected = oracle.logits(*by_hand(oracle, method, inputs))
    with torch.no_grad(), method(model) as handle:
        out = model(**inputs, use_cache=True)
    torch.testing.assert_close(out.logits[0], expected, **CLOSE)
    assert out.past_key_values.get_seq_length() == len(expected) == inputs["input_ids"].shape[1] - CELLS + 5
    selection = oracle.select(method, inputs["pixel_values"])
    assert handle.last[0].selection.indices.tolist() == selection.indices.tolist()


def test_what_the_oracle_checks_matters(kind: str) -> None:
    """The same prompt with other masks, positions or rows gives quite different logits."""
    model, processor = load(kind)
    inputs, oracle = one_image(processor, kind), Oracle(model)
    ids, types, rows, positions = by_hand(oracle, ClustRS(keep=5), inputs)
    assert rows is not None
    right = oracle.logits(ids, types, rows, positions)
    gaps = by_hand(oracle, ClustRS(keep=5), inputs, original=True)[3]
    for wrong in (
        oracle.logits(ids, 1 - types if not oracle.gemma3 else 0 * types, rows, positions),
        oracle.logits(ids, types, rows, gaps),
        oracle.logits(ids, types, rows.flip(0), positions),
    ):
        assert float((wrong - right).abs().max()) > 1e-3


def test_scores_are_those_of_eager_attention_in_their_places(kind: str) -> None:
    model, processor = load(kind)
    images = [make_image(), make_image(70, 30, 1)]
    inputs = batch([prompt(processor, question(kind), [image]) for image in images])
    with torch.no_grad(), FasterVLM(keep=3)(model) as handle:
        model(**inputs)
    scores = Oracle(model).maps(inputs["pixel_values"]).scores.unflatten(-1, (GRID, GRID))
    for last, expected in zip(handle.last, scores, strict=True):
        assert last.grids == [(GRID, GRID)]
        assert (last.placeholders, last.kept) == (CELLS, 3)
        assert last.layout.tile.tolist() == [0] * CELLS
        assert last.scores.dtype == torch.float32
        found = torch.zeros(GRID, GRID).index_put((last.layout.y, last.layout.x), last.scores)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        kept = {(int(last.layout.y[i]), int(last.layout.x[i])) for i in last.selection.indices}
        best = expected.flatten().topk(3).indices.tolist()
        assert kept == {(i // GRID, i % GRID) for i in best}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_scores_do_not_depend_on_the_towers_attention(kind: str, implementation: str) -> None:
    model, processor = load(kind)
    inputs = one_image(processor, kind)
    expected = Oracle(model).maps(inputs["pixel_values"]).scores[0]
    model.model.vision_tower.set_attn_implementation(implementation)
    with torch.no_grad(), ClustRS(keep=3)(model) as handle:
        model(**inputs)
    torch.testing.assert_close(handle.last[0].scores, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("place", [(0, 0), (1, 3), (3, 1)])
def test_a_bright_square_is_where_it_was_drawn(kind: str, place: tuple[int, int]) -> None:
    """The token that a bright square in a dark image changes most lies there, and the drawing outlines that cell."""
    model, processor = load(kind)
    side = 3 * PATCH
    image = Image.new("RGB", (side * GRID, side * GRID), "black")
    features = []
    for color in ("black", "white"):
        y, x = (side * i for i in place)
        ImageDraw.Draw(image).rectangle((x, y, x + side - 1, y + side - 1), fill=color)
        with torch.no_grad(), NoPruning()(model) as handle:
            model(**prompt(processor, question(kind), [image]))
        features.append(handle.last[0].selection.tokens)
    layout, changed = handle.last[0].layout, (features[1] - features[0]).norm(dim=-1)
    brightest = int(changed.argmax())
    assert (int(layout.y[brightest]), int(layout.x[brightest])) == place

    answer = ask(model, processor, image, "what?", Marked(brightest), 1)
    seen = as_seen(processor, image)
    assert seen.size == image.size
    assert lit_cells(seen, answer.image) == [place]


def test_greedy_tokens_are_those_of_pruning_by_hand(kind: str) -> None:
    """Each row of a padded batch as the prompt alone, without a cache: one image, none, two, and words only."""
    model, processor = load(kind)
    second = "<bos><image> and <image> differ how?" if kind == "gemma3" else "<image><image>differ how?"
    rows = [
        prompt(processor, question(kind), [make_image()]),
        prompt(processor, "<bos>no image here, only words and some more words"),
        prompt(processor, second, [make_image(30, 70, 1), make_image(50, 50, 2)]),
        prompt(processor, question(kind, "?"), [make_image(28, 28, 3)]),
    ]
    oracle, method = Oracle(model), ClustRS(keep=6)
    inputs = batch(rows)
    for original in (False, True):
        with method(model, positions="original" if original else "compact") as handle:
            out = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert [last.kept for last in handle.last] == [6] * 4
        width = inputs["input_ids"].shape[1]
        assert torch.equal(out[:, :width], inputs["input_ids"])
        for i, row in enumerate(rows):
            assert out[i, width:].tolist() == oracle.greedy(*by_hand(oracle, method, row, original), 5), (original, i)


def test_new_tokens_depend_on_what_is_kept(kind: str) -> None:
    """So that equal tokens mean something in the tests around."""
    model, processor = load(kind)
    inputs, told = one_image(processor, kind), []
    for name in ("none", "clustrs", "fastervlm", "divprune"):
        with (get_method(name) if name == "none" else get_method(name, keep=5))(model):
            told.append(new_tokens(model, inputs)[0].tolist())
    assert len({tuple(tokens) for tokens in told}) == 4, told
    assert min(len(set(tokens)) for tokens in told) > 1, told


def takes_static_cache(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the untouched model does; PaliGemma 2 does not in transformers 5.18 to 5.23."""
    try:
        new_tokens(model, inputs, 2, cache_implementation="static")
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_other_ways_of_generating(kind: str, way: dict[str, Any]) -> None:
    """Each row of a padded batch as the untouched model continues ids, token types and features made by hand."""
    model, processor = load(kind)
    second = "<bos><image> and <image> differ?" if kind == "gemma3" else "<image><image>differ?"
    rows = [one_image(processor, kind), prompt(processor, second, [make_image(30, 70, 1), make_image(50, 50, 2)])]
    oracle, method = Oracle(model), ClustRS(keep=6)
    if "cache_implementation" in way and not takes_static_cache(model, rows[0]):
        pytest.skip("this transformers cannot run it on a static cache, pruned or not")
    if way.get("do_sample"):  # one random stream for a whole batch
        rows = rows[1:]
    with method(model):
        out = new_tokens(model, batch(rows), **way)
        again = new_tokens(model, batch(rows), **way)
    assert torch.equal(out, again), "what one call is given is not used up by another"
    each = way.get("num_return_sequences", 1)
    for i, row in enumerate(rows):
        ids, types, features, _ = by_hand(oracle, method, row)
        assert features is not None
        images = BaseModelOutputWithPooling(pooler_output=features[None])  # all as one: 5.18 mixes several up in beams
        inputs = {"input_ids": ids[None], "token_type_ids": types[None], "mm_encoder_outputs": {"image": images}}
        expected = new_tokens(model, {**inputs, "attention_mask": torch.ones_like(ids)[None]}, **way)
        assert torch.equal(out[i * each : (i + 1) * each], expected), i


def test_original_positions(kind: str) -> None:
    model, processor = load(kind)
    inputs, method, oracle = one_image(processor, kind), ClustRS(keep=5), Oracle(model)
    ids, types, rows, positions = by_hand(oracle, method, inputs, original=True)
    with torch.no_grad(), method(model, positions="original"):
        out = model(**inputs, use_cache=True)
        torch.testing.assert_close(out.logits[0], oracle.logits(ids, types, rows, positions), **CLOSE)
        token = out.logits[0, -1].argmax()
        step = model(input_ids=token[None, None], past_key_values=out.past_key_values).logits
    longer = torch.cat([ids, token[None]]), torch.cat([types, types.new_tensor([int(not oracle.gemma3)])])
    expected = oracle.logits(*longer, rows, torch.cat([positions, positions[-1:] + 1]))
    torch.testing.assert_close(step[0, -1], expected[-1], **CLOSE)


@pytest.mark.parametrize("again", [False, True], ids=["ids alone", "with pixels again"])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_a_second_turn_with_the_cache(kind: str, positions: Any, again: bool) -> None:
    """As without a cache, where PaliGemma's first prompt alone is the prefix."""
    model, processor = load(kind)
    rows = [one_image(processor, kind), prompt(processor, question(kind, "?"), [make_image(30, 30, 1)])]
    inputs = batch(rows)
    more = torch.randint(20, 200, (2, 7), generator=torch.Generator().manual_seed(0))
    with ClustRS(keep=5)(model, positions=positions):
        first = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, suppress_tokens=list(range(8)), return_dict_in_generate=True
        )
        ids = torch.cat([first.sequences, more], 1)
        new = torch.ones(2, ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.long)
        types = new if kind != "gemma3" else 0 * new
        longer = {
            "input_ids": ids,
            "attention_mask": torch.cat([inputs["attention_mask"], new], 1),
            "token_type_ids": torch.cat([inputs["token_type_ids"], types], 1),
            "pixel_values": inputs["pixel_values"],
        }
        expected = new_tokens(model, longer)
        turn = longer if again else {name: longer[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(new_tokens(model, {**turn, "past_key_values": first.past_key_values}), expected)


@pytest.mark.parametrize("with_positions", [False, True])
def test_a_decoding_loop_of_ones_own(kind: str, with_positions: bool) -> None:
    """Prefill, then steps with the caller's mask and positions, which know nothing of pruning."""
    model, processor = load(kind)
    rows = [one_image(processor, kind), prompt(processor, question(kind, "?"), [make_image(30, 30, 1)])]
    inputs, oracle, method = batch(rows), Oracle(model), ClustRS(keep=5)
    first = 0 if kind == "gemma3" else 1
    mask = inputs["attention_mask"]
    position = (mask.cumsum(1) - 1).clamp(min=0) + first
    found = []
    with torch.no_grad(), method(model):
        out = model(**inputs, use_cache=True, **({"position_ids": position} if with_positions else {}))
        for _ in range(4):
            found.append(out.logits[:, -1].argmax(-1))
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            position = position[:, -1:] + 1
            out = model(
                input_ids=found[-1][:, None],
                attention_mask=mask,
                past_key_values=out.past_key_values,
                **({"position_ids": position} if with_positions else {}),
            )
    for i, row in enumerate(rows):
        assert torch.stack(found, 1)[i].tolist() == oracle.greedy(*by_hand(oracle, method, row), 4)


def test_the_model_is_restored_exactly(kind: str) -> None:
    model, processor = load(kind)
    inputs = one_image(processor, kind)

    def state() -> dict[str, dict[str, Any]]:
        return {name: dict(module.__dict__) for name, module in model.named_modules()}

    with torch.no_grad():
        expected = model(**inputs).logits
        before = state()
        with ClustRS(keep=3)(model):
            model(**inputs)
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
        with pytest.raises(RuntimeError), ClustRS(keep=3)(model):
            model(**{**inputs, "pixel_values": inputs["pixel_values"][:, :2]})
        after = state()
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].keys() == after[name].keys(), name
            assert all(before[name][key] is after[name][key] for key in before[name]), name
        assert torch.equal(model(**inputs).logits, expected)


def test_the_bare_model(kind: str) -> None:
    model, processor = load(kind)
    inputs = one_image(processor, kind)
    with torch.no_grad():
        with ClustRS(keep=6)(model):
            expected = model(**inputs).logits
        with ClustRS(keep=6)(model.model):
            assert torch.equal(Oracle(model).head(model.model(**inputs).last_hidden_state), expected)


@pytest.mark.parametrize(("method", "kept"), [(NoPruning(), CELLS), (ClustRS(keep=5), 5), (VisionZip(keep=4), 4)])
def test_images_encoded_once_answer_as_one_by_one(kind: str, method: Pruner, kept: int) -> None:
    model, processor = load(kind)
    images = [make_image(40, 60, seed) for seed in (1, 2)]
    words = [(0, "What is this?"), (1, "How many?"), (0, "Why so many of them?")]
    prompts = [(number, chat_prompt(processor, text)) for number, text in words]
    shared = sharing.encode(model, processor, images, prompts)
    assert shared.images[0] is shared.images[2]
    replies = sharing.reply(model, processor, shared, method, 5)
    for row, (number, text) in enumerate(words):
        alone = ask(model, processor, images[number], text, method, 5)
        (part,) = sharing.reply(model, processor, sharing.part(shared, row), method, 5)
        assert replies[row].text == part.text == alone.text
        assert replies[row].image.selection.indices.tolist() == alone.image.selection.indices.tolist()
        assert (alone.visual_tokens, alone.unpruned_tokens) == (kept, CELLS)


def test_the_command_line(kind: str, run: Any, tmp_path: Any) -> None:
    folder, image = saved(kind).name, tmp_path / "image.png"
    make_image().save(image)
    for command, options in (("ask", ["--keep", "5"]), ("compare", ["--keep", "5", "--methods", "clustrs", "none"])):
        drawing = tmp_path / f"{command}.png"
        code, out, err = run(command, image, "What is it?", "--model", folder, "--show", drawing, *options)
        assert code == 0, err
        assert str(CELLS) in out
        assert drawing.stat().st_size > 0


def test_calls_that_are_refused(kind: str) -> None:
    model, processor = load(kind)
    inputs = one_image(processor, kind)
    with ClustRS(keep=3)(model):
        with pytest.raises(ValueError, match=r"pixel_values_videos: a \w+ model takes no videos"):
            model(**inputs, pixel_values_videos=torch.zeros(1, 2, 3, 28, 28))
        with pytest.raises(
            ValueError, match=r"token_type_ids must have the shape of input_ids \[1, \d+\], got \[1, 5\]"
        ):
            model(**{**inputs, "token_type_ids": inputs["token_type_ids"][:, :5]})
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            model(**{**inputs, "pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)})
    model.model.vision_tower.config.model_type = "clip_vision_model"
    with pytest.raises(ValueError, match="vision tower 'clip_vision_model' has a CLS token"):
        ClustRS(keep=3).attach(model)
