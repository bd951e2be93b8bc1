"""Qwen's families: merged patches, three-axis positions, deepstack features, windows, videos."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from drawn_cells import Marked, lit_cells
from PIL import Image
from tiny_models import make_image, prepare
from tiny_models import qwen as qwen_models
from tiny_models.qwen import FAMILIES, TOKEN, Oracle, bright_square, plane_by_hand, video_inputs
from torch import Tensor
from transformers import AttentionInterface

from clustrs import ClusterMeans, ClustRS, NoPruning, get_method, list_methods
from clustrs.models import ask as shared_encoding
from clustrs.models.ask import as_seen, ask, chat_prompt
from clustrs.models.load import load_model

pytestmark = pytest.mark.usefixtures("as_published")

PRUNING = [name for name in list_methods("encoder") if name != "none"]
TEXTS = ["<s>user: <image> what?", "<s>no image here, only words", "<s><image> and <image> differ how?"]
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": False, "cache_implementation": "static"},
]
GREEDY: dict[str, Any] = {"do_sample": False}
NO_IMAGES: dict[str, Any] = {"suppress_tokens": [4, 5]}
"""Untrained models like to say <image>, which nobody could ask about afterwards."""
EACH = pytest.mark.parametrize("family", FAMILIES)
LoadQwen = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of saved models, each built once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            qwen_models.build(family, made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def load(folder: Callable[[str], Path]) -> LoadQwen:
    def fresh(family: str, **options: Any) -> tuple[Any, Any]:
        return tiny_models.load(folder(family), **options)

    return fresh


def images_of_texts() -> list[list[Image.Image]]:
    return [[make_image(40, 56)], [], [make_image(24, 40, 1), make_image(48, 16, 2)]]


def one(processor: Any, height: int = 40, width: int = 56) -> dict[str, Any]:
    return prepare(processor, [TEXTS[0]], [[make_image(height, width)]])


def two(processor: Any) -> dict[str, Any]:
    return prepare(processor, [TEXTS[2]], [images_of_texts()[2]])


def batch(processor: Any) -> dict[str, Any]:
    return prepare(processor, TEXTS, images_of_texts())


def generate(model: Any, inputs: dict[str, Any], count: int = 6, **way: Any) -> Tensor:
    """New tokens."""
    torch.manual_seed(0)
    with torch.no_grad():
        out: Tensor = model.generate(**inputs, max_new_tokens=count, **way)
    return out[:, inputs["input_ids"].shape[1] :]


def longer(inputs: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The same prompt with more text at its end."""
    grown = {**inputs, "input_ids": ids}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        more = torch.full((len(ids), ids.shape[1] - inputs[name].shape[1]), value)
        grown[name] = torch.cat([inputs[name], more], 1)
    return grown


@EACH
def test_keeping_everything_changes_nothing(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    inputs = batch(processor)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.model.rope_deltas = None
        for name in list_methods("encoder"):
            method = NoPruning() if name == "none" else get_method(name, keep=1000)
            with method(model):
                assert torch.equal(model(**inputs).logits, expected), name


@EACH
def test_logits_and_cache_are_the_oracles(load: LoadQwen, family: str) -> None:
    """Two images of different sizes, every method."""
    model, processor = load(family)
    inputs = two(processor)
    oracle = Oracle(model, inputs)
    text = int((inputs["input_ids"] != model.config.image_token_id).sum())
    for name in PRUNING:
        method = get_method(name, keep=5)
        kept = oracle.select(method)
        with torch.no_grad(), method(model) as handle:
            out = model(**inputs, use_cache=True)
        assert [last.selection.indices.tolist() for last in handle.last] == [s.indices.tolist() for s in kept], name
        torch.testing.assert_close(out.logits, oracle.logits(kept), atol=3e-5, rtol=1e-5, msg=name)
        assert out.past_key_values.get_seq_length() == text + 10
        assert [last.placeholders for last in handle.last] == [15, 12]


@EACH
def test_other_tokens_or_positions_would_be_noticed(load: LoadQwen, family: str) -> None:
    """The oracle's logits depend on what is kept and on its positions, so agreement with it means something."""
    model, processor = load(family)
    oracle = Oracle(model, one(processor))
    (kept,) = oracle.select(ClustRS(keep=5))
    (other,) = oracle.select(get_method("random", keep=5))
    expected = oracle.logits([kept])
    assert float((oracle.logits([other]) - expected).abs().max()) > 1e-2
    arguments = oracle.compacted([kept])
    arguments["position_ids"] = arguments["position_ids"][:1].expand(4, -1, -1)
    with torch.no_grad():
        moved = model(**arguments, attention_mask=torch.ones_like(arguments["input_ids"])).logits
    assert float((moved - expected).abs().max()) > 1e-3
    scores = oracle.parts[0]["scores"]
    assert float(scores.max() / scores.min()) > 1.05
    told = [oracle.new_tokens([selection], **GREEDY).tolist() for selection in (kept, other)]
    assert told[0] != told[1]


@EACH
def test_scores_and_places(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    inputs = batch(processor)
    with torch.no_grad(), get_method("fastervlm", keep=5)(model) as handle:
        model(**inputs)
    assert [last.grids for last in handle.last] == [[(5, 7)], [(3, 5)], [(6, 2)]]
    alone = [part for row in (one(processor), two(processor)) for part in Oracle(model, row).parts]
    for last, part in zip(handle.last, alone, strict=True):
        torch.testing.assert_close(last.scores, part["scores"], atol=1e-6, rtol=0)
        (height, width) = last.grids[0]
        assert last.layout.tile.tolist() == [0] * (height * width)
        assert (last.layout.y * width + last.layout.x).tolist() == list(range(height * width))


@EACH
def test_a_bright_square_is_found_where_it_is(load: LoadQwen, family: str) -> None:
    """The token that a bright square changes most, its score included, lies at the square's y and x, and the drawing
    outlines that cell."""
    model, processor = load(family)

    def seen(image: Image.Image) -> Any:
        with torch.no_grad(), get_method("fastervlm", keep=30)(model) as handle:
            model(**prepare(processor, [TEXTS[0]], [[image]]))
        return handle.last[0]

    dark = seen(Image.new("RGB", (6 * TOKEN, 5 * TOKEN), (10, 10, 10)))
    for y, x in ((0, 4), (3, 1), (4, 5)):
        image = bright_square(5, 6, y, x)
        bright = seen(image)
        for change in (
            (bright.selection.tokens - dark.selection.tokens).norm(dim=1),
            (bright.scores - dark.scores).abs(),
        ):
            at = int(change.argmax())
            assert (int(bright.layout.y[at]), int(bright.layout.x[at])) == (y, x)
        answer = ask(model, processor, image, "what?", Marked(at), 1)
        assert lit_cells(as_seen(processor, image), answer.image) == [(y, x)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@EACH
def test_new_tokens_are_the_oracles(load: LoadQwen, family: str, way: dict[str, Any]) -> None:
    model, processor = load(family)
    inputs = two(processor)
    oracle = Oracle(model, inputs)
    with ClustRS(keep=5)(model):
        found = generate(model, inputs, **way)
    assert torch.equal(found, oracle.new_tokens(oracle.select(ClustRS(keep=5)), **way))


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@EACH
def test_each_row_of_a_padded_batch_is_the_prompt_alone(load: LoadQwen, family: str, way: dict[str, Any]) -> None:
    model, processor = load(family)
    inputs = batch(processor)
    assert int((inputs["attention_mask"][:, 0] == 0).sum()) == 2
    returned = way.get("num_return_sequences", 1)
    with ClustRS(keep=5)(model):
        together = generate(model, inputs, **way).view(3, returned, -1)
        for row, (text, images) in enumerate(zip(TEXTS, images_of_texts(), strict=True)):
            alone = prepare(processor, [text], [images])
            assert torch.equal(together[row], generate(model, alone, **way)), text


@pytest.mark.parametrize("again", [False, True], ids=["ids alone", "with pixels again"])
@EACH
def test_a_second_turn_with_the_cache(load: LoadQwen, family: str, again: bool) -> None:
    model, processor = load(family)
    inputs = batch(processor)
    more = torch.randint(10, 200, (3, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ClustRS(keep=5)(model):
        state: dict[str, Any] = {}
        ids, grown = inputs["input_ids"], inputs
        for turn in range(3):
            known = grown if again or turn == 0 else {name: grown[name] for name in ("input_ids", "attention_mask")}
            way = {**GREEDY, **NO_IMAGES}
            out = model.generate(**known, **state, **way, max_new_tokens=4, return_dict_in_generate=True)
            assert torch.equal(out.sequences[:, ids.shape[1] :], generate(model, grown, 4, **way)), turn
            state = {"past_key_values": out.past_key_values}
            ids = torch.cat([out.sequences, more], 1)
            grown = longer(inputs, ids)


@pytest.mark.parametrize("given", ["mask", "mask and positions"])
@EACH
def test_a_decoding_loop_of_ones_own(load: LoadQwen, family: str, given: str) -> None:
    """The caller's mask and positions count the prompt as it was given."""
    model, processor = load(family)
    inputs = batch(processor)
    mask, own = inputs["attention_mask"], given == "mask and positions"
    grids = {"image_grid_thw": inputs["image_grid_thw"], "mm_token_type_ids": inputs["mm_token_type_ids"]}
    positions, deltas = model.model.get_rope_index(inputs["input_ids"], attention_mask=mask, **grids)
    with torch.no_grad(), ClustRS(keep=5)(model):
        expected = generate(model, inputs, 5, **GREEDY)
        out = model(**inputs, use_cache=True, **({"position_ids": positions} if own else {}))
        found = [out.logits[:, -1].argmax(-1)]
        for _ in range(4):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            step = (mask.sum(1, keepdim=True) - 1 + deltas).expand(3, -1, -1)
            out = model(
                input_ids=found[-1][:, None],
                attention_mask=mask,
                past_key_values=out.past_key_values,
                use_cache=True,
                **({"position_ids": step} if own else {}),
            )
            found.append(out.logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(found, 1), expected)
    assert model.model.rope_deltas is None


@EACH
def test_prompts_padded_on_the_right(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    processor.tokenizer.padding_side = "right"
    inputs = batch(processor)
    with torch.no_grad(), ClustRS(keep=5)(model):
        together = model(**inputs).logits
        for row, (text, images) in enumerate(zip(TEXTS, images_of_texts(), strict=True)):
            alone = model(**prepare(processor, [text], [images])).logits
            torch.testing.assert_close(together[row, : alone.shape[1]], alone[0], atol=3e-5, rtol=1e-5)


@EACH
def test_videos_have_one_budget_each(load: LoadQwen, family: str) -> None:
    model, _ = load(family)
    inputs = video_inputs(model.config, [(3, 2, 3), (2, 3, 2)], timestamps=family.startswith("qwen3"))
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 2.5])
    oracle = Oracle(model, inputs, "video", None)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.model.rope_deltas = None
        with ClustRS(keep=1.0)(model):
            assert torch.equal(model(**inputs).logits, expected)
    for method in (*(get_method(name, keep=5) for name in PRUNING), ClusterMeans(keep=5, across_frames=True)):
        kept = oracle.select(method)
        with torch.no_grad(), method(model) as handle:
            logits = model(**inputs).logits
        indices = [last.selection.indices.tolist() for last in handle.last]
        assert indices == [s.indices.tolist() for s in kept], method
        torch.testing.assert_close(logits, oracle.logits(kept), atol=3e-5, rtol=1e-5, msg=method.name)
    with torch.no_grad(), ClustRS(keep=2).attach(model, scope="frame") as frames:
        model(**inputs)
    assert [[last.layout.tile[i].item() for i in last.selection.indices] for last in frames.last] == [
        [0, 0, 1, 1, 2, 2],
        [0, 0, 1, 1],
    ]
    with method(model):
        found = generate(model, inputs, **GREEDY)
    assert torch.equal(found, oracle.new_tokens(kept, **GREEDY))
    first, second = handle.last
    assert (first.grids, second.grids) == ([(2, 3)] * 3, [(3, 2)] * 2)
    assert first.layout.tile.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert second.layout.y.tolist() == [0, 0, 1, 1, 2, 2] * 2


@EACH
def test_an_image_and_a_video_in_one_prompt(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    image = one(processor, 24, 16)
    video = video_inputs(model.config, [(2, 2, 2)], timestamps=family.startswith("qwen3"))
    inputs = {**image, **video}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = torch.cat([video[name], image[name]], 1)
    with torch.no_grad():
        expected = model(**inputs).logits
        with ClustRS(keep=1.0)(model):
            assert torch.equal(model(**inputs).logits, expected)
        with ClustRS(keep=3)(model) as handle:
            out = model(**inputs, use_cache=True)
    visual = (inputs["mm_token_type_ids"] != 0).sum()
    assert [(len(last.grids), last.kept) for last in handle.last] == [(1, 3), (2, 3)]
    assert out.past_key_values.get_seq_length() == inputs["input_ids"].shape[1] - int(visual) + 6


@EACH
def test_the_model_is_put_back(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    inputs = one(processor)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for name in list_methods("encoder"):
        method = NoPruning() if name == "none" else get_method(name, keep=3)
        with method(model), torch.no_grad():
            model(**inputs)
            model.generate(**inputs, max_new_tokens=2)
        with pytest.raises(Exception), method(model):  # noqa: B017, PT011
            model(**{**inputs, "pixel_values": inputs["pixel_values"][..., :5]})
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name]), name


@EACH
def test_options_that_change_nothing_here(load: LoadQwen, family: str) -> None:
    """An image is one crop, and survivors always keep their positions."""
    model, processor = load(family)
    inputs = two(processor)
    with torch.no_grad():
        with ClustRS(keep=5)(model):
            expected = model(**inputs).logits
        for options in ({"scope": "crop"}, {"crops": "base"}, {"positions": "original"}):
            with ClustRS(keep=5)(model, **options):
                assert torch.equal(model(**inputs).logits, expected)
        with ClustRS(keep=5)(model.model):
            hidden = model.model(**inputs).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), expected)


@EACH
def test_training(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    inputs = one(processor)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, -100)
    with ClustRS(keep=5)(model) as handle:
        model(**inputs, labels=labels).loss.backward()
    assert handle.last[0].kept == 5
    merger = dict(model.model.visual.merger.named_parameters())
    assert all(float(weight.grad.abs().sum()) > 0 for weight in merger.values() if weight.dim() > 1)


@EACH
def test_prompts_share_encoded_images(load: LoadQwen, family: str) -> None:
    model, processor = load(family)
    images = [make_image(24, 40, 1), make_image(48, 16, 2)]
    words = [(1, "What is this?"), (0, "How many?"), (1, "Why so many of them?")]
    prompts = [(index, chat_prompt(processor, question)) for index, question in words]
    encoded = shared_encoding.encode(model, processor, images, prompts)
    assert encoded.images[0] is encoded.images[2]
    for method in (NoPruning(), ClustRS(keep=5), get_method("visionzip", keep=5)):
        replies = shared_encoding.reply(model, processor, encoded, method, 5)
        for (index, question), reply in zip(words, replies, strict=True):
            alone = ask(model, processor, images[index], question, method, 5)
            assert reply.text == alone.text
            assert torch.equal(reply.image.selection.indices, alone.image.selection.indices)
            assert reply.image.placeholders == alone.image.placeholders
        (single,) = shared_encoding.reply(model, processor, shared_encoding.part(encoded, 1), method, 5)
        assert single.text == replies[1].text


def test_ask_and_draw_a_saved_model(folder: Callable[[str], Path]) -> None:
    """A folder is loaded and asked; the outlines in the drawing lie where the kept tokens lie in the image."""
    model, processor = load_model(str(folder("qwen2_5_vl")))
    image = make_image(30, 58)
    answer = ask(model, processor, image, "What is it?", get_method("fastervlm", keep=3), 4)
    assert (answer.unpruned_tokens, answer.visual_tokens, answer.image.grids) == (28, 3, [(4, 7)])
    assert as_seen(processor, image).size == image.size
    expected = [divmod(i, 7) for i in answer.image.selection.indices.tolist()]
    assert lit_cells(as_seen(processor, image), answer.image) == expected


@pytest.mark.parametrize("command", ["ask", "compare"])
def test_the_command_line(folder: Callable[[str], Path], run: Any, tmp_path: Path, command: str) -> None:
    image = tmp_path / "image.png"
    make_image(30, 61).save(image)
    common = ["--model", folder("qwen3_vl"), "--keep", "5", "--max-new-tokens", "3"]
    code, out, err = run(command, image, "What is it?", *common, "--show", tmp_path / "kept.png")
    assert code == 0, err
    assert out
    assert (tmp_path / "kept.png").stat().st_size > 0


def test_packed_sequences_of_flash_attention(load: LoadQwen) -> None:
    """Its kernel takes all images in one call: each is scored by itself."""
    model, processor = load("qwen2_5_vl")
    inputs = two(processor)
    expected = [part["scores"] for part in Oracle(model, inputs).parts]
    calls: list[int] = []

    def packed(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        lengths = options["cu_seq_lens_q"].diff().tolist()
        calls.append(len(lengths))
        parts = zip(*(part.split(lengths, 2) for part in (query, key, value)), strict=True)
        joined = [torch.nn.functional.scaled_dot_product_attention(q, k, v) for q, k, v in parts]
        return torch.cat(joined, 2).transpose(1, 2), None

    AttentionInterface.register("flash_attention_packed_test", packed)
    model.model.visual.config._attn_implementation_internal = "flash_attention_packed_test"
    with torch.no_grad(), get_method("fastervlm", keep=5)(model) as handle:
        model(**inputs)
    assert 2 in calls
    for last, scores in zip(handle.last, expected, strict=True):
        torch.testing.assert_close(last.scores, scores, atol=1e-6, rtol=0)


def test_inputs_that_do_not_fit(load: LoadQwen) -> None:
    model, processor = load("qwen3_vl")
    inputs = one(processor)
    short = {name: value for name, value in inputs.items() if name != "image_grid_thw"}
    with torch.no_grad(), ClustRS(keep=3)(model):
        expected = model(**inputs).logits
        for call in (model, lambda **given: model.generate(**given, max_new_tokens=1)):
            with pytest.raises(ValueError, match="image_grid_thw is missing, expected it with pixel_values"):
                call(**short)
            with pytest.raises(ValueError, match="mm_token_type_ids must have the shape of input_ids"):
                call(**{**inputs, "mm_token_type_ids": inputs["mm_token_type_ids"][:, 1:]})
            with pytest.raises(ValueError, match="Image features and image tokens do not match"):
                call(**{**inputs, "input_ids": inputs["input_ids"].clamp(max=model.config.image_token_id - 1)})
        del inputs["mm_token_type_ids"]
        assert torch.equal(model(**inputs).logits, expected), "they follow from the ids"


def test_a_tower_without_full_attention(load: LoadQwen) -> None:
    model, _ = load("qwen2_5_vl")
    model.config.vision_config.fullatt_block_indexes = []
    with pytest.raises(ValueError, match="fullatt_block_indexes names no block"):
        ClustRS(keep=3).attach(model)


def shrunk_by_hand(part: dict[str, Any], selection: Any) -> list[Tensor]:
    """The planes of an image, with the rows of kept tokens pulled towards the means of their clusters."""
    features, scores = part["features"].double(), part["scores"].double()
    norms = features.norm(dim=1)
    weights = scores + 2 * scores.mean() * (norms - norms.mean()).clamp(min=0)
    planes = [plane.clone() for plane in part["planes"]]
    for plane, raw in zip(planes, part["planes"], strict=True):
        for j, index in enumerate(selection.indices.tolist()):
            members = (selection.labels == j).nonzero()[:, 0].tolist()
            total = sum(float(weights[i]) for i in members)
            mean = torch.stack([weights[i] / total * raw[i].double() for i in members]).sum(0)
            alpha = float(selection.alpha[j])
            plane[index] = (alpha * raw[index].double() + (1 - alpha) * mean).to(plane.dtype)
    return planes


@pytest.mark.parametrize("name", ["clustrs", "denoise"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_deepstack_features_shrunk_as_the_tokens_are(load: LoadQwen, family: str, name: str) -> None:
    model, processor = load(family)
    inputs, method = two(processor), get_method(name, keep=4)
    oracle = Oracle(model, inputs)
    selections = oracle.select(method)
    for part, selection in zip(oracle.parts, selections, strict=True):
        part["planes"] = shrunk_by_hand(part, selection)
    with torch.no_grad():
        expected = model(**oracle.compacted(selections)).logits
        with method(model) as raw:
            plain = model(**inputs).logits
        with method(model, deepstack="shrunk") as handle:
            logits = model(**inputs).logits
    assert [last.selection.indices.tolist() for last in handle.last] == [s.indices.tolist() for s in selections]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    assert (logits - plain).abs().max() > 1e-2
    for shrunk, whole in zip(handle.last, raw.last, strict=True):
        assert torch.equal(shrunk.selection.tokens, whole.selection.tokens), "the tokens themselves are the same"


def test_deepstack_features_of_means_are_means(load: LoadQwen) -> None:
    """With the weights of the tokens; a rival that does not say its weights has those of the slot, as published."""
    model, processor = load("qwen3_vl")
    inputs = two(processor)
    oracle = Oracle(model, inputs)
    selections = oracle.select(get_method("clustermeans", keep=4))
    for part, selection in zip(oracle.parts, selections, strict=True):
        torch.testing.assert_close(plane_by_hand(part["features"], selection), selection.tokens, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        expected = model(**oracle.compacted(selections)).logits
        for part in oracle.parts:
            part["planes"] = [plane.roll(1, 0) for plane in part["planes"]]
        other = model(**oracle.compacted(selections)).logits
        with get_method("clustermeans", keep=4)(model):
            logits = model(**inputs).logits
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)
    assert (logits - other).abs().max() > 1e-2


def test_what_is_not_shrunk_has_raw_deepstack_features(load: LoadQwen) -> None:
    model, processor = load("qwen3_vl")
    inputs = two(processor)
    for name in ("fastervlm", "visionzip"):
        method = get_method(name, keep=4)
        with torch.no_grad():
            with method(model):
                expected = model(**inputs).logits
            with method(model, deepstack="shrunk"):
                assert torch.equal(model(**inputs).logits, expected)


def test_deepstack_is_refused_where_there_is_none(load: LoadQwen) -> None:
    with pytest.raises(ValueError, match=r"deepstack must be 'raw' for a qwen3_5 model"):
        ClustRS(keep=4).attach(load("qwen3_5")[0], deepstack="shrunk")
    with pytest.raises(ValueError, match=r"deepstack must be one of 'raw', 'shrunk', got 'both'"):
        ClustRS(keep=4).attach(load("qwen3_vl")[0], deepstack="both")  # type: ignore[arg-type]
