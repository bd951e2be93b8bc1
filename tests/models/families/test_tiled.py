"""InternVL, SmolVLM and Idefics3: models that cut an image into tiles, pruned, against pruning by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_cells import lit_cells, lit_tile_cells
from PIL import Image
from tiny_models import make_image
from tiny_models import tiled as tiled_models
from tiny_models.tiled import FAMILIES, GRID, IMAGE_TOKENS, TOKENS, Case
from torch import Tensor

from clustrs import ClustRS, NoPruning, get_method, list_methods
from clustrs.models import ask as shared_encoding
from clustrs.models import draw
from clustrs.models.ask import as_seen, ask, chat_prompt
from clustrs.models.load import load_model, load_processor

pytestmark = pytest.mark.usefixtures("as_published")

Load = Callable[..., Case]
PRUNING = [name for name in list_methods("encoder") if name != "none"]
WIDE, SMALL = make_image(60, 120), make_image(30, 30, 1)
"""Three tiles in all families; one in InternVL, five in the others."""
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in made.items():
        tiled_models.build(family, folder)
    return made


@pytest.fixture(scope="session")
def load(folders: dict[str, Path]) -> Load:
    def fresh(family: str, **options: Any) -> Case:
        return tiled_models.load_case(family, folders[family], **options)

    return fresh


def greedy(case: Case) -> dict[str, Any]:
    """Untrained models like to say image tokens, which nobody could ask about afterwards."""
    return {"do_sample": False, "suppress_tokens": list(range(4, case.processor.tokenizer.convert_tokens_to_ids("!")))}


def generate(model: Any, **arguments: Any) -> Tensor:
    torch.manual_seed(0)
    out: Tensor = model.generate(**arguments, max_new_tokens=5)
    return out


@each_family
def test_keeping_everything_is_bit_identical(load: Load, family: str) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE b IMAGE?", "only words", "IMAGE!"], [[WIDE, SMALL], [], [make_image(70, 50, 2)]])
    with torch.no_grad():
        expected = case.model(**inputs).logits
        for name in list_methods("encoder"):
            method = get_method(name) if name == "none" else get_method(name, keep=1000)
            with method(case.model):
                assert torch.equal(case.model(**inputs).logits, expected), name


@pytest.mark.parametrize("crops", ["all", "base"])
@each_family
def test_logits_are_those_of_pruning_by_hand(load: Load, family: str, crops: Any) -> None:
    """Every method, two images in a prompt, with compact positions."""
    case = load(family)
    images = [WIDE, SMALL]
    inputs, counts = case.prepare(["a IMAGE b IMAGE what?"], [images]), case.counts(images)
    assert counts == ([3, 1] if family == "internvl" else [3, 5])
    for name in PRUNING:
        method = get_method(name, keep=7)
        rows, _, kept = tiled_models.oracle(case, method, inputs, counts, crops == "base", "abwhat?")
        with torch.no_grad():
            expected = case.model(inputs_embeds=rows).logits
            with method(case.model, crops=crops) as handle:
                out = case.model(**inputs, use_cache=True)
        assert [last.selection.indices.tolist() for last in handle.last] == [s.indices.tolist() for s in kept], name
        torch.testing.assert_close(out.logits, expected, atol=3e-5, rtol=1e-5, msg=name)
        assert out.past_key_values.get_seq_length() == rows.shape[1]
        assert [last.placeholders for last in handle.last] == [count * TOKENS for count in counts]


@each_family
def test_frames_of_a_video_are_images(load: Load, family: str) -> None:
    """Prompts are written as the video halves of the processors write them: one tile per frame."""
    case = load(family)
    text = (
        "Frame1: IMAGE\nFrame2: IMAGE" if family == "internvl" else "\nFrame from 00:00:IMAGE\nFrame from 00:01:IMAGE"
    )
    whole = {"crop_to_patches" if family == "internvl" else "do_image_splitting": False}
    inputs, method = case.prepare([text], [[WIDE, make_image(60, 120, 1)]], **whole), ClustRS(keep=5)
    rows, _, kept = tiled_models.oracle(case, method, inputs, [1, 1])
    with torch.no_grad(), method(case.model) as handle:
        pruned = case.model(**inputs).logits
    assert [last.selection.indices.tolist() for last in handle.last] == [s.indices.tolist() for s in kept]
    with torch.no_grad():
        torch.testing.assert_close(pruned, case.model(inputs_embeds=rows).logits, atol=3e-5, rtol=1e-5)


@each_family
def test_one_budget_for_a_video(load: Load, family: str) -> None:
    """Frames that come as images of a prompt share the budget, also in a batch; clusters lie across them."""
    case = load(family)
    whole = {"crop_to_patches" if family == "internvl" else "do_image_splitting": False}
    frames = [WIDE, make_image(60, 120, 1), make_image(60, 120, 2)]
    inputs = case.prepare(["IMAGE IMAGE IMAGE what?"], [frames], **whole)
    both = case.prepare(["IMAGE IMAGE IMAGE what?", "IMAGE?"], [frames, [SMALL]], **whole)
    options: dict[str, Any] = {"scope": "video", "positions": "compact", "attention": "plain"}
    with torch.no_grad():
        expected = case.model(**inputs).logits
        with NoPruning()(case.model) as handle:
            case.model(**inputs)
        every = handle.last
        tokens, scores = (
            torch.cat(parts) for parts in zip(*((i.selection.tokens, i.scores) for i in every), strict=True)
        )
        with ClustRS(keep=1.0)(case.model, **options):
            assert torch.equal(case.model(**inputs).logits, expected)
        for keep in (1, 10):
            joint = ClustRS(keep=keep).select(tokens, scores, cls=family == "internvl")
            with ClustRS(keep=keep)(case.model, **options) as handle:
                pruned = case.model(**inputs).logits
                kept = [[n * TOKENS + i for i in last.selection.indices.tolist()] for n, last in enumerate(handle.last)]
                assert [i for frame in kept for i in frame] == joint.indices.tolist()
                case.model(**both)
                assert [last.kept for last in handle.last] == [*map(len, kept), min(keep, TOKENS)]
            slots = (inputs["input_ids"][0] == case.model.config.image_token_id).nonzero()[:, 0]
            stays = torch.ones_like(inputs["input_ids"][0], dtype=torch.bool)
            stays[slots] = False
            stays[slots[joint.indices]] = True
            rows = case.model.get_input_embeddings()(inputs["input_ids"])[0]
            rows[slots[joint.indices]] = joint.tokens
            by_hand = case.model(inputs_embeds=rows[stays][None]).logits
            torch.testing.assert_close(pruned, by_hand, atol=3e-5, rtol=1e-5)


@each_family
def test_original_positions(load: Load, family: str) -> None:
    case = load(family)
    inputs, method = case.prepare(["a IMAGE b IMAGE what?"], [[WIDE, SMALL]]), get_method("fastervlm", keep=6)
    rows, columns, _ = tiled_models.oracle(case, method, inputs, case.counts([WIDE, SMALL]))
    with torch.no_grad():
        expected = case.model(inputs_embeds=rows, position_ids=columns).logits
        compact = case.model(inputs_embeds=rows).logits
        with method(case.model, positions="original"):
            pruned = case.model(**inputs).logits
    torch.testing.assert_close(pruned, expected, atol=3e-5, rtol=1e-5)
    assert not torch.allclose(pruned, compact, atol=1e-3), "positions matter to this model"


@each_family
def test_a_budget_for_each_crop(load: Load, family: str) -> None:
    """Each tile is pruned as if it were an image; all stay in their places."""
    case = load(family)
    inputs = case.prepare(["a IMAGE what?"], [[WIDE]])
    for name in PRUNING:
        method = get_method(name, keep=4)
        rows, _, kept = tiled_models.oracle(case, method, inputs, [1, 1, 1], question="awhat?")
        with torch.no_grad():
            expected = case.model(inputs_embeds=rows).logits
            with method(case.model, scope="crop") as handle:
                pruned = case.model(**inputs).logits
        torch.testing.assert_close(pruned, expected, atol=3e-5, rtol=1e-5, msg=name)
        own = torch.cat([torch.where(s.indices < 0, -1, s.indices + i * TOKENS) for i, s in enumerate(kept)])
        assert handle.last[0].selection.indices.tolist() == own.tolist(), name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@each_family
def test_scores_are_those_of_eager_attention(load: Load, family: str, implementation: str) -> None:
    case = load(family, attn_implementation=implementation)
    inputs = case.prepare(["a IMAGE what?"], [[WIDE]])
    with torch.no_grad(), ClustRS(keep=5)(case.model) as handle:
        case.model(**inputs)
    states = tiled_models.by_hand(case, case.tiles(inputs))
    torch.testing.assert_close(handle.last[0].scores, states.scores, atol=1e-6, rtol=1e-6)
    assert states.scores.std() > 1e-3, "the map is not flat"


@pytest.mark.parametrize("layer", [-2, 2])
def test_internvl_with_another_feature_layer(load: Load, layer: int) -> None:
    """The layer that the projector reads is the one that is listened to."""
    case = load("internvl")
    inputs = case.prepare(["a IMAGE what?"], [[WIDE]])
    tower = case.tower
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        weights = tower(inputs["pixel_values"], output_attentions=True).attentions[1][:, :, 0, 1:].mean(1)
        expected = torch.cat([tiled_models.merge(tile[:, None]) for tile in weights]).mean(1)
        with ClustRS(keep=5)(case.model) as handle:
            case.model(**inputs, vision_feature_layer=layer)
        called = handle.last[0].scores
        case.model.config.vision_feature_layer = layer
        full = case.model(**inputs).logits
        with NoPruning()(case.model) as handle:
            assert torch.equal(case.model(**inputs).logits, full)
    for scores in (called, handle.last[0].scores):
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_crops_with_padding(load: Load, family: str) -> None:
    """Patches of padding are not attended to; scores still are the model's own."""
    case = load(family)
    inputs = case.prepare(["a IMAGE what?"], [[WIDE]])
    inputs["pixel_attention_mask"][:, :, 20:] = 0
    with torch.no_grad():
        full = case.model(**inputs).logits
        with NoPruning()(case.model) as handle:
            assert torch.equal(case.model(**inputs).logits, full)
    scores = handle.last[0].scores.view(3, GRID, GRID)
    assert float(scores[:, 3].max()) == 0
    assert float(scores[:, :2].min()) > 0
    assert scores.sum((1, 2)) * 4 == pytest.approx([1, 1, 1], rel=1e-5)


WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": False, "cache_implementation": "static"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@each_family
def test_generate(load: Load, family: str, way: dict[str, Any]) -> None:
    case = load(family)
    inputs, method = case.prepare(["a IMAGE b IMAGE what?"], [[WIDE, SMALL]]), ClustRS(keep=6)
    ids = inputs["input_ids"]
    rows, _, _ = tiled_models.oracle(case, method, inputs, case.counts([WIDE, SMALL]))
    expected = generate(case.model, inputs_embeds=rows, attention_mask=torch.ones(rows.shape[:2]).long(), **way)
    with method(case.model):
        out = generate(case.model, **inputs, **way)
    assert torch.equal(out[:, : ids.shape[1]], ids.expand(len(out), -1))
    assert torch.equal(out[:, ids.shape[1] :], expected)


@each_family
def test_new_tokens_depend_on_what_is_kept(load: Load, family: str) -> None:
    """So that equal tokens mean something in the tests around."""
    case = load(family)
    inputs, told = case.prepare(["a IMAGE b IMAGE what?"], [[WIDE, SMALL]]), set()
    for name in ("none", "clustrs", "fastervlm", "divprune"):
        with (get_method(name) if name == "none" else get_method(name, keep=6))(case.model):
            told.add(tuple(generate(case.model, **inputs, **greedy(case))[0, -5:].tolist()))
    assert len(told) == 4, told


TEXTS = ["user: IMAGE what?", "no image here, only words", "IMAGE and IMAGE differ how?", "IMAGEIMAGE"]
IMAGES = [[WIDE], [], [make_image(70, 50, 2), SMALL], [make_image(28, 28, 3), make_image(90, 40, 4)]]


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("keep", [6, 0.5])
@each_family
def test_each_row_of_a_padded_batch_is_the_prompt_alone(
    load: Load, family: str, keep: float, way: dict[str, Any]
) -> None:
    """Images of one to five tiles, a prompt without any, two that follow each other at once."""
    case = load(family)
    inputs = case.prepare(TEXTS, IMAGES)
    length = inputs["input_ids"].shape[1]
    method = ClustRS(keep=keep)
    with method(case.model) as handle:
        batch = generate(case.model, **inputs, **greedy(case), **way)
        kept = [last.selection.indices.tolist() for last in handle.last]
        assert len(kept) == 5
        assert torch.equal(batch[:, :length], inputs["input_ids"])
        for i, text in enumerate(TEXTS):
            alone = case.prepare([text], [IMAGES[i]])
            single = generate(case.model, **alone, **greedy(case), **way)
            assert torch.equal(batch[i, length:], single[0, alone["input_ids"].shape[1] :]), text
            if IMAGES[i]:
                assert [last.selection.indices.tolist() for last in handle.last] == kept[: len(IMAGES[i])]
                kept = kept[len(IMAGES[i]) :]


@pytest.mark.parametrize("positions", ["compact", "original"])
@each_family
def test_a_second_turn_with_the_cache(load: Load, family: str, positions: Any) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE what?"], [[WIDE]])
    more = torch.randint(60, 200, (1, 7), generator=torch.Generator().manual_seed(0))
    with ClustRS(keep=5)(case.model, positions=positions):
        first = case.model.generate(**inputs, max_new_tokens=4, **greedy(case), return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more], 1)
        whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = generate(case.model, **whole, **greedy(case))
        second = generate(case.model, input_ids=ids, past_key_values=first.past_key_values, **greedy(case))
    assert torch.equal(second, expected)


@each_family
def test_a_decoding_loop_of_ones_own(load: Load, family: str) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE what?", "IMAGE and what is that?"], [[WIDE], [SMALL]])
    mask = inputs["attention_mask"]
    with torch.no_grad(), ClustRS(keep=5)(case.model):
        expected = generate(case.model, **inputs, do_sample=False)
        out = case.model(**inputs, use_cache=True)
        new: list[Tensor] = []
        for _ in range(5):
            new.append(out.logits[:, -1].argmax(-1, keepdim=True))
            mask = torch.cat([mask, torch.ones_like(new[-1])], 1)
            out = case.model(
                input_ids=new[-1], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True
            )
    assert torch.equal(torch.cat(new, 1), expected[:, inputs["input_ids"].shape[1] :])


def attend_to_brightness(case: Case) -> None:
    """Let the last layer of the tower attend to patches as they are bright."""
    pixels: list[Tensor] = []
    cls = case.family == "internvl"
    attention = case.tower.encoder.layer[-1].attention if cls else case.tower.encoder.layers[-1].self_attn

    def bright_keys(module: Any, args: Any, out: Tensor) -> Tensor:
        patch = pixels[-1].shape[-1] // (2 * GRID)
        light = torch.nn.functional.avg_pool2d(pixels[-1].mean(1), patch).flatten(1)
        return torch.nn.functional.pad(light, (int(cls), 0), value=-1.0)[..., None].expand_as(out).contiguous()

    case.tower.register_forward_pre_hook(
        lambda module, args, kwargs: pixels.append(kwargs["pixel_values"]), with_kwargs=True
    )
    attention.k_proj.register_forward_hook(bright_keys)
    attention.q_proj.register_forward_hook(lambda module, args, out: torch.ones_like(out))


def bright_cell(y: int, x: int) -> Image.Image:
    """A dark image of 64 x 128 pixels, with one bright cell of the grid that the whole image has."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[16 * y : 16 * y + 16, 32 * x : 32 * x + 32] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("place", [(0, 3), (2, 1), (3, 2)])
@each_family
def test_a_bright_square_is_found_where_it_is(load: Load, family: str, place: tuple[int, int]) -> None:
    """Once in the whole image, which is tile 0, and over two cells of one of two tiles side by side. All are drawn."""
    case, (y, x) = load(family), place
    attend_to_brightness(case)
    image = bright_cell(y, x)
    inputs = case.prepare(["a IMAGE what?"], [[image]])
    with torch.no_grad(), get_method("fastervlm", keep=3)(case.model) as handle:
        case.model(**inputs)
    last = handle.last[0]
    assert last.grids == [(GRID, GRID)] * 3
    kept = last.selection.indices
    found = sorted(
        zip(*(part[kept].tolist() for part in (last.layout.tile, last.layout.y, last.layout.x)), strict=True)
    )
    tile, left = 1 + x // 2, 2 * (x % 2)
    assert found == [(0, y, x), (tile, y, left), (tile, y, left + 1)]
    shown = as_seen(case.processor, image)
    assert lit_cells(shown, last) == [(y, x)], "the drawn cell is the bright one"
    assert lit_tile_cells(shown, last, (GRID, 2 * GRID)) == [(y, 2 * x), (y, 2 * x + 1)]


@each_family
def test_ask_about_frames_and_draw_them(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    model, processor = load_model(str(folders[family]))
    frames = [make_image(60, 60, seed) for seed in range(4)]
    result = ask(model, processor, frames, "What is this?", ClustRS(keep=6), 3)
    assert (result.unpruned_tokens, result.visual_tokens) == (4 * TOKENS, 6)
    assert sum(one.kept for one in result.frames) == 6
    each = ask(model, processor, frames, "What is this?", ClustRS(keep=2), 3, scope="crop")
    assert [one.kept for one in each.frames] == [2] * 4
    for name in ("kept.png", "kept.gif"):
        draw.draw_frames(frames, result.frames, tmp_path / name, "what")
        with Image.open(tmp_path / name) as drawn:
            assert getattr(drawn, "n_frames", 1) == (4 if name == "kept.gif" else 1)
    with pytest.raises(ValueError, match=r"ends in \.png, \.pdf, \.svg, \.gif, \.mp4, got 'kept\.jpg'"):
        draw.check_path("kept.jpg", video=True)


@each_family
def test_ask_and_draw(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    model, processor = load_model(str(folders[family]))
    result = ask(model, processor, WIDE, "What is this?", ClustRS(keep=6), 3)
    assert (result.unpruned_tokens, result.visual_tokens, result.new_tokens) == (3 * TOKENS, 6, 3)
    assert result.seconds.prefill > 0
    assert as_seen(processor, WIDE).size == WIDE.size
    draw.draw_kept(as_seen(processor, WIDE), result.image, tmp_path / "kept.png")
    draw.draw_comparison(WIDE, {"a": result.image, "b": result.image}, tmp_path / "both.png")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    assert (tmp_path / "both.png").stat().st_size > 1000


@each_family
def test_the_command_line(
    folders: dict[str, Path], tmp_path: Path, family: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    WIDE.save(tmp_path / "wide.png")
    options = (
        "--model",
        folders[family],
        "--max-new-tokens",
        2,
        "--keep",
        3,
        "--json",
        "--show",
        tmp_path / "kept.png",
    )
    for command in (("ask",), ("compare", "--methods", "none", "clustrs")):
        code, out, err = run(command[0], tmp_path / "wide.png", "What?", *command[1:], *options)
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert result.get("results", [result])[-1]["visual_tokens"] == 3
        assert (tmp_path / "kept.png").stat().st_size > 1000


@pytest.mark.parametrize("crops", ["all", "base"])
@each_family
def test_images_encoded_once_for_many_prompts(load: Load, family: str, crops: Any) -> None:
    case = load(family)
    model, processor = case.model, case.processor
    images = [make_image(30, 30, 1), WIDE, make_image(90, 40, 2)]
    words = [(1, "What is this?"), (2, "How many?"), (1, "Why so many of them?"), (0, "Who?")]
    prompts = [(index, chat_prompt(processor, question)) for index, question in words]
    batch = shared_encoding.encode(model, processor, images, prompts, crops)
    assert batch.images[0] is batch.images[2]
    for method in (NoPruning(), ClustRS(keep=5), get_method("visionzip", keep=0.3)):
        replies = shared_encoding.reply(model, processor, batch, method, 4, crops=crops)
        for (index, question), reply in zip(words, replies, strict=True):
            alone = ask(model, processor, images[index], question, method, 4, crops=crops)
            assert reply.text == alone.text
            assert torch.equal(reply.image.selection.indices, alone.image.selection.indices)
            assert (reply.image.kept, reply.image.placeholders) == (alone.image.kept, alone.image.placeholders)


@each_family
def test_the_base_tiles_alone_go_through_the_tower(load: Load, family: str) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE b IMAGE?", "IMAGE"], [[WIDE, SMALL], [make_image(90, 40, 4)]])
    seen: list[int] = []
    case.tower.register_forward_hook(lambda module, args, kwargs, out: seen.append(len(out[0])), with_kwargs=True)
    with torch.no_grad(), ClustRS(keep=6)(case.model, crops="base") as handle:
        case.model(**inputs)
    assert seen == [3]
    assert [len(last.scores) for last in handle.last] == [TOKENS] * 3
    assert [last.grids for last in handle.last] == [[(GRID, GRID)]] * 3


@each_family
def test_the_model_is_put_back(load: Load, family: str) -> None:
    case = load(family)
    model, inputs = case.model, case.prepare(["a IMAGE b"], [[WIDE]])

    def state() -> dict[str, dict[str, Any]]:
        return {name: dict(module.__dict__) for name, module in model.named_modules()}

    with torch.no_grad():
        expected = model(**inputs).logits
    before = state()
    for name in list_methods("encoder"):
        method = get_method(name) if name == "none" else get_method(name, keep=3)
        with method(model), torch.no_grad():
            model(**inputs)
            model.generate(**inputs, max_new_tokens=2)
        with pytest.raises(ValueError, match="square"), method(model):
            model(**{**inputs, "pixel_values": inputs["pixel_values"][..., :5]})
    after = state()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name]), name
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


@each_family
def test_gradients_reach_the_projector(load: Load, family: str) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE b"], [[WIDE]])
    with ClustRS(keep=4)(case.model):
        out = case.model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["input_ids"] == case.image_id, -100))
    out.loss.backward()
    inner = case.model.model
    weight = (
        inner.multi_modal_projector.linear_1.weight
        if family == "internvl"
        else inner.connector.modality_projection.proj.weight
    )
    assert float(weight.grad.abs().max()) > 0


@each_family
def test_prompts_that_do_not_fit_their_images(load: Load, family: str) -> None:
    case = load(family)
    inputs = case.prepare(["a IMAGE b IMAGE c"], [[WIDE, SMALL]])
    slots = (inputs["input_ids"][0] == case.image_id).nonzero()[:, 0]
    fewer = {**inputs, "input_ids": inputs["input_ids"].clone()}
    fewer["input_ids"][0, slots[0]] = 60
    gone = {**inputs, "input_ids": inputs["input_ids"].clone()}
    gone["input_ids"][0, slots[-TOKENS:]] = 60
    words = inputs["input_ids"].masked_fill(inputs["input_ids"] == case.image_id, 60)
    for wrong in (fewer, gone, {**inputs, "input_ids": words}):
        with (
            ClustRS(keep=4)(case.model),
            pytest.raises(ValueError, match="Image features and image tokens do not match"),
        ):
            case.model(**wrong)


def test_a_prompt_that_the_processor_did_not_write(load: Load) -> None:
    case = load("smolvlm")
    inputs = case.prepare(["a IMAGE b"], [[WIDE]])
    around = case.processor.tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
    ids = inputs["input_ids"].clone()
    ids[0, (ids[0] == around).nonzero()[:-1, 0]] = 60
    with ClustRS(keep=4)(case.model), pytest.raises(ValueError, match="must be the prompt that the processor writes"):
        case.model(**{**inputs, "input_ids": ids})


def test_internvl_with_a_foreign_tower(load: Load) -> None:
    model = load("internvl").model
    model.model.vision_tower.config.model_type = "clip_vision_model"
    with pytest.raises(ValueError, match="vision tower 'clip_vision_model' is not supported: 'internvl_vision' is"):
        ClustRS(keep=4).attach(model)


def test_internvl_feature_strategy(load: Load) -> None:
    case = load("internvl")
    inputs = case.prepare(["a IMAGE b"], [[WIDE]])
    with (
        ClustRS(keep=4)(case.model),
        pytest.raises(ValueError, match=r"select_strategy must be .default. .* got .full."),
    ):
        case.model(**inputs, vision_feature_select_strategy="full")


@each_family
def test_the_processor_saves_as_the_whole_one(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    processor = load_processor(str(folders[family]))
    processor.save_pretrained(tmp_path)
    names = {"internvl": "InternVLProcessor", "smolvlm": "SmolVLMProcessor", "idefics3": "Idefics3Processor"}
    assert f'"{names[family]}"' in (tmp_path / "processor_config.json").read_text()
    assert chat_prompt(processor, "What?") == f"user: {IMAGE_TOKENS[family]} What? assistant:"
