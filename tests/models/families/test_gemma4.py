"""Gemma 4 while a method is attached, against the untouched model and against pruning by hand."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers as tf
from drawn_cells import lit_cells, pixels_of_cell
from PIL import Image
from tiny_models import gemma4, make_image
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from clustrs import ClustRS, get_method, list_methods
from clustrs.models import ask as shared_encoding
from clustrs.models import draw
from clustrs.models.adapters.base import adapter_class
from clustrs.models.ask import as_seen, ask
from clustrs.models.load import load_processor

pytestmark = pytest.mark.usefixtures("as_published")

Load = Callable[..., tuple[Any, Any]]
VARIANTS = list(gemma4.VARIANTS)
PRUNING = [name for name in list_methods("encoder") if name != "none"]
KEEP = 9
GREEDY: dict[str, Any] = {"do_sample": False, "suppress_tokens": list(range(len(gemma4.SPECIAL)))}
"""Untrained models like to say <image>, which nobody could ask about afterwards."""
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": False, "cache_implementation": "static"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def build(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp(f"gemma4-{variant}")
            gemma4.build(variant.removesuffix("+audio"), made[variant], audio=variant.endswith("+audio"))
        return made[variant]

    return build


@pytest.fixture(scope="module")
def load(folder: Callable[[str], Path]) -> Load:
    """A model and its processor, as if freshly loaded."""

    def fresh(variant: str = "large") -> tuple[Any, Any]:
        return tiny_models.load(folder(variant))

    return fresh


def by_hand(model: Any, inputs: dict[str, Any], keep: int = KEEP) -> tuple[list[int], Tensor]:
    """The columns that stay of a prompt alone, and the rows that fill its placeholders, with ClustRS."""
    seen = [gemma4.look(model, *gemma4.patches(inputs, i)) for i in range(len(inputs["pixel_values"]))]
    selections = [image.select(model, ClustRS(keep=keep)) for image in seen]
    kept = [selection.indices.tolist() for selection in selections]
    columns = gemma4.shorten(inputs["input_ids"][0], kept, [len(image.scores) for image in seen])
    return columns, torch.cat([selection.tokens for selection in selections])


def new_tokens(model: Any, inputs: dict[str, Any], count: int = 6, **more: Any) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        out: Tensor = model.generate(**inputs, max_new_tokens=count, **{**GREEDY, **more})
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_keeping_everything_changes_nothing(load: Load, variant: str) -> None:
    model, processor = load(variant)
    inputs = gemma4.prepare(processor, ["<bos>a <image> b <image> c"], [[make_image(), make_image(70, 30, 1)]])
    with torch.no_grad():
        expected = model(**inputs).logits
        for name in list_methods("encoder"):
            method = get_method(name) if name == "none" else get_method(name, keep=1.0)
            with method(model):
                assert torch.equal(model(**inputs).logits, expected), name


def assert_logits(logits: Tensor, expected: Tensor, name: str | None = None) -> None:
    """Equal to 3e-5 of the largest logit, which is what float32 rounds a sum of such terms to on any machine."""
    torch.testing.assert_close(logits, expected, atol=3e-5 * float(expected.abs().max()), rtol=0, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(40, 60), (70, 30)])
def test_logits_and_cache_are_those_of_pruning_by_hand(load: Load, variant: str, shape: tuple[int, int]) -> None:
    model, processor = load(variant)
    inputs = gemma4.ask(processor, height=shape[0], width=shape[1])
    ids = inputs["input_ids"][0]
    seen = gemma4.look(model, *gemma4.patches(inputs, 0))
    for name in PRUNING:
        method = get_method(name, keep=KEEP)
        with torch.no_grad(), method(model) as handle:
            out = model(**inputs, use_cache=True)
        (last,) = handle.last
        kept = seen.select(model, method, last.layout)
        assert last.selection.indices.tolist() == kept.indices.tolist(), name
        columns = gemma4.shorten(ids, [sorted(kept.indices.tolist())], [len(seen.scores)])
        expected = gemma4.logits(model, ids[columns], kept.tokens)
        assert_logits(out.logits, expected, name)
        assert out.past_key_values.get_seq_length() == len(columns)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_scores_are_those_of_eager_attention(load: Load, variant: str, implementation: str) -> None:
    """Of images whose patches are padded by different numbers."""
    model, processor = load(variant)
    model.set_attn_implementation(implementation)
    images = [make_image(), make_image(90, 20, 1), make_image(36, 36, 2)]
    inputs = gemma4.prepare(processor, ["<bos><image><image><image>"], [images])
    padding = (inputs["image_position_ids"][..., 0] < 0).sum(1).tolist()
    assert len(set(padding)) > 1
    assert max(padding) > 30
    with torch.no_grad(), get_method("fastervlm", keep=KEEP)(model) as handle:
        model(**inputs)
    for i, last in enumerate(handle.last):
        seen = gemma4.look(model, *gemma4.patches(inputs, i))
        torch.testing.assert_close(last.scores, seen.scores, atol=1e-6, rtol=1e-4)
        patches = len(gemma4.patches(inputs, i)[0][0])
        assert float(last.scores.sum()) * gemma4.KERNEL**2 == pytest.approx(1, abs=1e-5), patches


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_new_tokens_are_those_of_pruning_by_hand(load: Load, variant: str, way: dict[str, Any]) -> None:
    model, processor = load(variant)
    inputs = gemma4.ask(processor)
    ids = inputs["input_ids"]
    with ClustRS(keep=KEEP)(model):
        out = new_tokens(model, inputs, **way)
    columns, rows = by_hand(model, inputs)
    short = {name: inputs[name][:, columns] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    short["mm_encoder_outputs"] = {"image": BaseModelOutputWithPooling(pooler_output=[rows])}
    assert torch.equal(out, new_tokens(model, short, **way))
    if way == {"do_sample": False}:
        prompt = ids[0, columns]
        for token in out[0]:
            logits = gemma4.logits(model, prompt, rows)[0, -1]
            logits[GREEDY["suppress_tokens"]] = -torch.inf
            assert int(logits.argmax()) == token
            prompt = torch.cat([prompt, token[None]])


@pytest.mark.parametrize("variant", VARIANTS)
def test_new_tokens_depend_on_what_is_kept(load: Load, variant: str) -> None:
    """So that equal tokens mean something in the tests around."""
    model, processor = load(variant)
    inputs, told = gemma4.ask(processor), set()
    for name in ("none", "clustrs", "fastervlm", "divprune"):
        with (get_method(name) if name == "none" else get_method(name, keep=KEEP))(model):
            told.add(tuple(new_tokens(model, inputs)[0].tolist()))
    assert len(told) == 4, told


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_each_row_of_a_padded_batch_is_the_prompt_alone(load: Load, variant: str, positions: str) -> None:
    """Four prompts of different lengths, one without an image and one with two."""
    model, processor = load(variant)
    texts = [
        "<bos>user: <image> what?",
        "<bos>no image here, only words",
        "<bos><image> and <image> differ how?",
        "<bos><image>",
    ]
    images = [[make_image()], [], [make_image(30, 70, 1), make_image(50, 50, 2)], [make_image(28, 28, 3)]]
    inputs = gemma4.prepare(processor, texts, images)
    assert not inputs["attention_mask"][1, 0]
    with ClustRS(keep=KEEP)(model, positions=positions) as handle:
        batch = new_tokens(model, inputs)
        with torch.no_grad():
            logits = model(**inputs).logits
        assert [last.kept for last in handle.last] == [KEEP] * 4
        for i in range(4):
            alone = gemma4.prepare(processor, [texts[i]], [images[i]])
            assert batch[i].tolist() == new_tokens(model, alone)[0].tolist()
            with torch.no_grad():
                expected = model(**alone).logits[0]
            if positions == "compact":  # otherwise forward counts the padding, as the model without a method does
                assert_logits(logits[i, -len(expected) :], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_images_and_original_positions(load: Load, variant: str) -> None:
    model, processor = load(variant)
    images = [make_image(), make_image(70, 30, 1)]
    inputs = gemma4.prepare(processor, ["<bos>a <image> b <image> c"], [images])
    columns, rows = by_hand(model, inputs)
    ids = inputs["input_ids"][0, columns]
    for positions, counted in (("compact", torch.arange(len(ids))), ("original", torch.tensor(columns))):
        with torch.no_grad(), ClustRS(keep=KEEP)(model, positions=positions):
            logits = model(**inputs).logits
        assert_logits(logits, gemma4.logits(model, ids, rows, counted))


def test_one_crop_is_an_image(load: Load) -> None:
    """An image has one crop, so the options that tell crops apart change nothing."""
    model, processor = load()
    inputs = gemma4.ask(processor)
    with torch.no_grad():
        with ClustRS(keep=KEEP)(model):
            expected = model(**inputs).logits
        for options in ({"scope": "crop"}, {"crops": "base"}):
            with ClustRS(keep=KEEP)(model, **options) as handle:
                assert torch.equal(model(**inputs).logits, expected)
            assert handle.last[0].kept == KEEP


@pytest.mark.parametrize("again", [False, True], ids=["ids alone", "with pixels again"])
@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_turn_with_the_cache(load: Load, variant: str, positions: str, again: bool) -> None:
    model, processor = load(variant)
    inputs = gemma4.ask(processor)
    more = torch.randint(20, 200, (1, 7), generator=torch.Generator().manual_seed(0))
    with ClustRS(keep=KEEP)(model, positions=positions):
        first = model.generate(**inputs, max_new_tokens=5, **GREEDY, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more], 1)
        types = torch.cat([inputs["mm_token_type_ids"], torch.zeros(1, 12, dtype=torch.long)], 1)
        longer = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        expected = new_tokens(model, longer)
        turn = longer if again else {"input_ids": ids, "attention_mask": longer["attention_mask"]}
        second = new_tokens(model, {**turn, "past_key_values": first.past_key_values})
    assert second.tolist() == expected.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("given", ["mask", "mask and positions"])
def test_a_decoding_loop_of_ones_own(load: Load, variant: str, given: str) -> None:
    """Prefill, then steps with the caller's mask, which knows nothing of pruning: each row as if it were alone."""
    model, processor = load(variant)
    texts = ["<bos>user: <image> what?", "<bos>user: <image> and <image> what may that one be?"]
    images = [[make_image()], [make_image(30, 70, 1), make_image(50, 50, 2)]]
    inputs = gemma4.prepare(processor, texts, images)
    with torch.no_grad(), ClustRS(keep=KEEP)(model):
        tokens = loop(model, inputs, given == "mask and positions")
        for i in range(2):
            alone = gemma4.prepare(processor, [texts[i]], [images[i]])
            assert tokens[i] == new_tokens(model, alone, 5)[0].tolist()


def loop(model: Any, inputs: dict[str, Any], with_positions: bool) -> list[list[int]]:
    """Five greedy tokens of each row of a batch that is padded on the left."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(**inputs, use_cache=True, **({"position_ids": positions} if with_positions else {}))
    token = pick(out.logits)
    tokens, position = [token], positions[:, -1:]
    for _ in range(4):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        position = position + 1
        more = {"position_ids": position} if with_positions else {}
        out = model(
            input_ids=token[:, None], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True, **more
        )
        token = pick(out.logits)
        tokens.append(token)
    return torch.stack(tokens, 1).tolist()


def pick(logits: Tensor) -> Tensor:
    logits[:, -1, GREEDY["suppress_tokens"]] = -torch.inf
    return logits[:, -1].argmax(-1)


def bright_box(height: int, width: int, top: int, left: int, size: tuple[int, int]) -> Image.Image:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[top : top + size[0], left : left + size[1]] = 255
    return Image.fromarray(pixels)


@torch.no_grad()
def isolate_patches(model: Any) -> None:
    """Change a model so that each token depends on its own pixels alone, wherever it lies."""
    for layer in model.model.vision_tower.encoder.layers:
        layer.self_attn.o_proj.linear.weight.zero_()
    model.model.vision_tower.patch_embedder.position_embedding_table.zero_()


@pytest.mark.parametrize(("shape", "grid"), [((36, 60), (6, 10)), ((96, 24), (16, 4))])
def test_a_bright_square_is_where_it_is(load: Load, shape: tuple[int, int], grid: tuple[int, int]) -> None:
    """Tokens of the square stand out from those of the dark image, in the grid's own coordinates."""
    model, processor = load()
    isolate_patches(model)
    for y, x in ((1, 2), (4, 0), (5, 3)):
        image = bright_box(*shape, top=y * 6, left=x * 6, size=(6, 6))
        inputs = gemma4.prepare(processor, ["<bos><image>"], [[image]])
        with torch.no_grad(), get_method("divprune", keep=2)(model) as handle:
            model(**inputs)
        (last,) = handle.last
        assert last.grids == [grid]
        features = model.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output[0]
        odd = int((features - features.median(0).values).abs().sum(1).argmax())
        assert (int(last.layout.y[odd]), int(last.layout.x[odd])) == (y, x)
        assert odd in last.selection.indices.tolist()
        assert len(last.layout.y) == grid[0] * grid[1] == last.placeholders


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_put_back(load: Load, variant: str) -> None:
    model, processor = load(variant)
    inputs = gemma4.ask(processor)
    with torch.no_grad():
        expected = model(**inputs).logits
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for name in list_methods("encoder"):
        method = get_method(name) if name == "none" else get_method(name, keep=3)
        with method(model), torch.no_grad():
            model(**inputs)
            model.generate(**inputs, max_new_tokens=2)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), method(model):
            model(**{**inputs, "pixel_values": inputs["pixel_values"][..., :5]})
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name]), name
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


def test_the_bare_model(load: Load) -> None:
    model, processor = load()
    inputs = gemma4.ask(processor)
    with torch.no_grad():
        with ClustRS(keep=KEEP)(model):
            expected = model(**inputs, output_hidden_states=True).hidden_states[-1]
        with ClustRS(keep=KEEP)(model.model):
            ours = model.model(**inputs).last_hidden_state
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_video_has_one_budget_for_all_frames(load: Load, variant: str) -> None:
    model, processor = load(variant)
    frames = [make_image(40, 60, seed) for seed in range(3)]
    inputs = gemma4.video_inputs(processor, [frames])
    ids = inputs["input_ids"][0]
    images = {"pixel_values": inputs["pixel_values_videos"], "image_position_ids": inputs["video_position_ids"]}
    seen = [gemma4.look(model, *gemma4.patches(images, i)) for i in range(3)]
    video = gemma4.Seen(
        **{field.name: torch.cat([getattr(s, field.name) for s in seen]) for field in fields(gemma4.Seen)}
    )
    for keep in (KEEP, 180):
        with torch.no_grad(), ClustRS(keep=keep)(model) as handle:
            logits = model(**inputs).logits
        (last,) = handle.last
        kept = video.select(model, ClustRS(keep=keep))
        assert (last.kept, last.placeholders, last.grids) == (keep, 180, [(6, 10)] * 3)
        assert last.selection.indices.tolist() == kept.indices.tolist()
        place = last.layout.tile * 60 + last.layout.y * 10 + last.layout.x
        assert place.tolist() == list(range(180))
        columns = gemma4.shorten(ids, [kept.indices.tolist()], [180], gemma4.VIDEO)
        expected = gemma4.logits(model, ids[columns], kept.tokens)
        assert_logits(logits, expected)


def test_videos_of_different_lengths_and_stacked_ones(load: Load) -> None:
    model, processor = load()
    videos = [[make_image(40, 60, seed) for seed in range(n)] for n in (3, 1)]
    inputs = gemma4.video_inputs(processor, videos)
    with ClustRS(keep=KEEP)(model) as handle:
        batch = new_tokens(model, inputs)
        assert [len(last.grids) for last in handle.last] == [3, 1]
        for i in range(2):
            alone = gemma4.video_inputs(processor, [videos[i]])
            expected = new_tokens(model, alone)
            assert batch[i].tolist() == expected[0].tolist()
            del alone["num_frames_per_video"]
            stacked = {name: alone[name][None] for name in ("pixel_values_videos", "video_position_ids")}
            assert torch.equal(new_tokens(model, {**alone, **stacked}), expected), "as transformers 5.18 has them"


def test_an_image_and_a_video_in_one_prompt(load: Load) -> None:
    model, processor = load()
    image = gemma4.ask(processor, "<bos><image> then ")
    video = gemma4.video_inputs(processor, [[make_image(40, 60, seed) for seed in range(2)]])
    together = {**video, **{name: image[name] for name in ("pixel_values", "image_position_ids")}}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        together[name] = torch.cat([image[name], video[name]], 1)
    with torch.no_grad(), ClustRS(keep=KEEP)(model) as handle:
        out = model(**together, use_cache=True)
    text = int(((together["input_ids"] != gemma4.IMAGE) & (together["input_ids"] != gemma4.VIDEO)).sum())
    assert [last.kept for last in handle.last] == [KEEP, KEEP]
    assert out.past_key_values.get_seq_length() == text + 2 * KEEP


def test_sound_is_left_alone(load: Load) -> None:
    model, processor = load("small+audio")
    wave = np.random.default_rng(0).normal(size=8000).astype(np.float32)
    text = "<bos>look: <image> hear: <audio> well?"
    inputs = dict(processor(text=[text], images=[[make_image()]], audio=[wave], return_tensors="pt"))
    sounds = int((inputs["input_ids"] == gemma4.AUDIO).sum())
    assert sounds > 3
    with torch.no_grad():
        expected = model(**inputs).logits
        with ClustRS(keep=1.0)(model):
            assert torch.equal(model(**inputs).logits, expected)
        with ClustRS(keep=KEEP)(model):
            pruned = model(**inputs, use_cache=True)
            louder = model(**{**inputs, "input_features": inputs["input_features"] + 1}).logits
    text_and_sounds = int((inputs["input_ids"] != gemma4.IMAGE).sum())
    assert pruned.past_key_values.get_seq_length() == text_and_sounds + KEEP
    assert not torch.allclose(louder[0, -1], pruned.logits[0, -1])


@pytest.mark.parametrize(
    ("missing", "partner"),
    [
        ("image_position_ids", "pixel_values"),
        ("video_position_ids", "pixel_values_videos"),
        ("num_frames_per_video", "pixel_values_videos"),
    ],
)
def test_missing_arguments(load: Load, missing: str, partner: str) -> None:
    model, processor = load()
    inputs = gemma4.ask(processor) if partner == "pixel_values" else gemma4.video_inputs(processor, [[make_image()]])
    del inputs[missing]
    with (
        ClustRS(keep=KEEP)(model),
        pytest.raises(ValueError, match=f"{missing} is missing, expected it with {partner}"),
    ):
        model(**inputs)


def test_wrong_arguments(load: Load) -> None:
    model, processor = load()
    video = gemma4.video_inputs(processor, [[make_image()]])
    image = gemma4.ask(processor)
    torn = image["image_position_ids"].clone()
    torn[0, :9] = -1
    with ClustRS(keep=KEEP)(model):
        with pytest.raises(ValueError, match=r"num_frames_per_video=\[2\]: pixel_values_videos has 1 frames"):
            model(**{**video, "num_frames_per_video": torch.tensor([2])})
        with pytest.raises(ValueError, match="position ids of an image: 531 patches in 18 rows and 30 columns"):
            model(**{**image, "image_position_ids": torn})


def test_a_model_without_a_vision_tower() -> None:
    config = gemma4.configure("small", 300)
    config.vision_config = None
    with pytest.raises(ValueError, match="no vision tower"):
        ClustRS(keep=3).attach(tf.Gemma4ForConditionalGeneration(config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_encodings_answer_as_generate_does(load: Load, variant: str) -> None:
    model, processor = load(variant)
    images = [make_image(), make_image(70, 30, 1)]
    prompts = [(0, "<bos>user: <image> what?"), (1, "<bos><image> and that?"), (0, "<bos>is <image> red?")]
    batch = shared_encoding.encode(model, processor, images, prompts)
    assert batch.images[0] is batch.images[2]
    method = ClustRS(keep=KEEP)
    replies = shared_encoding.reply(model, processor, batch, method, 6)
    for row, (index, text) in enumerate(prompts):
        alone = gemma4.prepare(processor, [text], [[images[index]]])
        with method(model), torch.no_grad():
            out = model.generate(**alone, max_new_tokens=6, do_sample=False)
        new = out[0, alone["input_ids"].shape[1] :]
        expected = processor.decode(new, skip_special_tokens=True).strip()
        assert replies[row].text == expected
        (single,) = shared_encoding.reply(model, processor, shared_encoding.part(batch, row), method, 6)
        assert single.text == expected


@pytest.mark.parametrize(("height", "width"), [(40, 60), (90, 20)])
def test_ask_and_drawings(load: Load, tmp_path: Path, height: int, width: int) -> None:
    model, processor = load()
    image = make_image(height, width)
    answer = ask(model, processor, image, "what is it?", ClustRS(keep=KEEP), 4)
    assert (answer.visual_tokens, answer.new_tokens) == (KEEP, 4)
    rows, columns = answer.image.grids[0]
    assert answer.unpruned_tokens == rows * columns
    assert (rows > columns) == (height > width)
    shown = as_seen(processor, image)
    assert shown.size == image.size, "the whole image goes through the tower"
    draw.draw_kept(shown, answer.image, tmp_path / "kept.png")
    draw.draw_comparison(shown, {"ClustRS": answer.image}, tmp_path / "compared.png")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    assert (tmp_path / "compared.png").stat().st_size > 1000


def test_command_line(run: Callable[..., tuple[int, str, str]], folder: Callable[[str], Path], tmp_path: Path) -> None:
    path, shared = tmp_path / "image.png", ["--model", folder("large"), "--keep", KEEP, "--max-new-tokens", 2]
    make_image().save(path)
    code, out, _ = run("ask", path, "what?", *shared, "--show", tmp_path / "kept.png")
    assert code == 0
    assert "clustrs: kept 9 of 60 visual tokens" in out
    code, out, _ = run("compare", path, "what?", *shared, "--methods", "none,visionzip", "--show", tmp_path / "all.png")
    assert code == 0
    assert "60/60" in out
    assert "9/60" in out
    assert (tmp_path / "kept.png").exists()
    assert (tmp_path / "all.png").exists()


def test_kept_cells_are_drawn_where_the_box_is(load: Load) -> None:
    """Also where the processor changes the image's size, and a little its shape."""
    model, processor = load()
    isolate_patches(model)
    cases = [((36, 60), 6, 12, (6, 6), (6, 10)), ((180, 360), 72, 98, (72, 65), (5, 11))]
    for shape, top, left, size, grid in cases:
        image = bright_box(*shape, top, left, size)
        answer = ask(model, processor, image, "where?", get_method("divprune", keep=2), 1)
        assert answer.image.grids == [grid]
        shown = as_seen(processor, image)
        cells = lit_cells(Image.new("RGB", shown.size), answer.image)
        assert len(cells) == 2
        boxes = [pixels_of_cell(shown.size, grid, y, x) for y, x in cells]
        shares = [np.asarray(image.convert("L").crop(box)).mean() / 255 for box in boxes]
        assert max(shares) > 0.9, "one of the two kept cells lies on the box"
        assert min(shares) < 0.1, "and one outside of it"


def test_training(load: Load) -> None:
    """Labels are shortened along with the ids, and gradients reach the projector."""
    model, processor = load()
    inputs = gemma4.ask(processor)
    model.train()
    labels = inputs["input_ids"].masked_fill(inputs["mm_token_type_ids"] > 0, -100)
    with ClustRS(keep=KEEP)(model):
        loss = model(**inputs, labels=labels).loss
    loss.backward()
    assert float(model.model.embed_vision.embedding_projection.weight.grad.abs().sum()) > 0
    columns, rows = by_hand(model.eval(), inputs)
    logits = gemma4.logits(model, inputs["input_ids"][0, columns], rows)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, columns][1:], ignore_index=-100)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)


def test_a_published_processor_loads_without_torchvision(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Published ones have a video half, which is left out."""
    for file in folder("large").iterdir():
        shutil.copy(file, tmp_path)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["video_processor"] = {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 32}
    path.write_text(json.dumps(settings))
    processor = load_processor(str(tmp_path))
    assert type(processor).__name__ == "Gemma4Processor"
    assert "video_processor" not in processor.get_attributes()
    inputs = gemma4.ask(processor)
    assert int((inputs["input_ids"] == gemma4.IMAGE).sum()) == 60


def test_prompts_are_those_of_the_whole_processor(load: Load) -> None:
    """Transformers' own one, without its video half, as far as this version lets it be imported."""
    try:
        whole = tf.Gemma4Processor
    except ModuleNotFoundError:
        pytest.skip("this version of transformers needs torchvision for it")
    _, ours = load()
    theirs = type("Gemma4Processor", (whole,), {"__init__": gemma4_init})(ours)
    wave = np.random.default_rng(0).normal(size=8000).astype(np.float32)
    for texts, images, audio in (
        (["<bos>a <image> b <image>", "<bos>no"], [[make_image(), make_image(90, 20)], []], None),
        (["<bos>a <image> b <audio>"], [[make_image()]], [wave]),
        (["<bos>text"], None, None),
    ):
        expected = theirs(text=texts, images=images, audio=audio, return_tensors="pt")
        inputs = ours(text=texts, images=images, audio=audio, return_tensors="pt")
        assert inputs.keys() == expected.keys()
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs)


def gemma4_init(self: Any, ours: Any) -> None:
    """Take over the parts of another processor."""
    self.__dict__.update(ours.__dict__)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"text": ["<bos>a"], "images": [[make_image()]]},
            r"images: the prompts have \[0\] times <image>, got \[1\] images",
        ),
        ({"text": ["<bos><image>"]}, r"the prompts have \[1\] times <image>, got \[0\] images"),
        ({"text": ["<bos><|video|>"], "videos": [[make_image()]]}, "videos: they need torchvision"),
        ({"images": [[make_image()]]}, "text is missing"),
    ],
)
def test_what_the_processor_refuses(load: Load, given: dict[str, Any], words: str) -> None:
    _, processor = load()
    with pytest.raises(ValueError, match=words):
        processor(**given, return_tensors="pt")


def test_the_unified_model_is_refused_for_a_true_reason() -> None:
    """It reads pixels without a tower: another family's adapter would not help."""
    with pytest.raises(ValueError, match="'gemma4_unified' is not supported: it has no vision tower") as refused:
        adapter_class("gemma4_unified")
    assert "did you mean" not in str(refused.value)
