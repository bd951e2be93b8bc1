"""Long videos in chunks of frames: against `select` on each chunk, then on what the chunks have left, by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import pytest
import torch
from peak_memory import Peak
from tiny_models import gemma4, make_image, qwen
from torch import Tensor

from clustrs import ClustRS, Layout, NoPruning, Pruner, PrunerInputs, Selection, get_method
from clustrs.models.adapters.base import VisualTokens, get_adapter
from clustrs.models.scoring import StageTimer

pytestmark = pytest.mark.usefixtures("as_published")
LoadFamily = Callable[[str], tuple[Any, Any]]
VIDEOS = ("llava_onevision", "gemma4", *qwen.FAMILIES)
IMAGES = ("llava", "internvl", "smolvlm", "qwen2_vl", "gemma4")
"""Families with videos, and some of those whose images are frames with scope="video"."""
METHODS = ("clustrs", "clustermeans", "divprune", "evs", "vidcom2", "tome")
FRAMES, CHUNK, KEEP = 5, 2, 5


def video_inputs(family: str, model: Any, processor: Any, frames: int = FRAMES) -> dict[str, Any]:
    """Return a prompt with one video, as the processor writes it."""
    if family == "llava_onevision":
        ids = torch.tensor([[1, *[model.config.video_token_id] * (4 * frames + 1), 50, 51]])
        pixels = torch.randn(1, frames, 3, 28, 28, generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "pixel_values_videos": pixels}
    if family == "gemma4":
        return gemma4.video_inputs(processor, [[make_image(40, 60, seed) for seed in range(frames)]])
    return qwen.video_inputs(model.config, [(frames, 2, 3)], timestamps=family.startswith("qwen3"))


def frame_inputs(family: str, model: Any, processor: Any, counts: tuple[int, ...] = (FRAMES,)) -> dict[str, Any]:
    """Return prompts with so many frames as images each."""
    whole = {"internvl": {"crop_to_patches": False}, "smolvlm": {"do_image_splitting": False}}.get(family, {})
    images = [[make_image(40, 60, 10 * row + seed) for seed in range(n)] for row, n in enumerate(counts)]
    texts = ["<s>" + f"{processor.image_token} " * n + "what?" for n in counts]
    flat = [image for row in images for image in row]
    given = images if get_adapter(model).nested_images else flat
    return dict(processor(images=given, text=texts, padding=True, return_tensors="pt", **whole))


@dataclass(frozen=True)
class Fixed(Pruner):
    """Returns a given selection."""

    name = "fixed"
    selection: Selection = field(default=None)  # type: ignore[assignment]

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        return self.selection.map(lambda part: part[None])


def inputs_of(video: VisualTokens, rows: Tensor, tokens: Tensor) -> PrunerInputs:
    layout = Layout(**{name: part[rows] for name, part in vars(video.layout).items()})
    states: dict[str, Any] = {name: getattr(video, name)[rows] for name in ("scores", "hidden", "keys")}
    first, cls = int(video.layout.tile[rows[0]]), False
    for name, own in (("hidden", video.cls_hidden), ("keys", video.cls_keys)):
        if own is not None and own.shape[1]:
            states[name], cls = torch.cat([own[first], states[name]]), True
    return PrunerInputs(tokens, layout=layout, cls=cls, **states)


def nearest(tokens: Tensor, selection: Selection) -> Tensor:
    """Return the kept token that each belongs to, and a kept one to itself."""
    if selection.labels is not None:
        return selection.labels
    labels = torch.cdist(tokens.double(), tokens[selection.indices].double()).argmin(1)
    labels[selection.indices] = torch.arange(len(selection.indices))
    return labels


def by_hand(method: Pruner, video: VisualTokens, chunk: int, again: bool = True) -> Selection:
    """Select from each chunk of frames, then from all that is left; what a token stands for is followed through."""
    n, frame = len(video.candidates), video.layout.frame
    assert frame is not None
    tokens, mixed, belongs, shares = [], [], torch.full((n,), -1), torch.ones(n)
    indices: list[Tensor] = []
    for start in range(0, int(frame.max()) + 1, chunk):
        rows = ((frame >= start) & (frame < start + chunk)).nonzero()[:, 0]
        own = video.tokens[rows]
        kept = method.select(inputs_of(video, rows, own))
        belongs[rows] = nearest(own, kept) + sum(map(len, indices))
        shares[rows] = torch.ones(len(rows)) if kept.shares is None else kept.shares
        mixed.append(torch.zeros_like(kept.indices, dtype=torch.bool) if kept.merged is None else kept.merged)
        tokens.append(kept.tokens)
        indices.append(rows[kept.indices])
    left, rows = torch.cat(tokens), torch.cat(indices)
    final = method if again else replace(method, keep=1.0)
    last = final.select(inputs_of(video, rows, left))
    if last.shares is not None:
        shares = shares * last.shares[belongs]
    merged = {}
    if last.merged is not None:
        merged = {"merged": last.merged | torch.cat(mixed)[last.indices]}
        merged |= {} if last.shares is None else {"shares": shares}
    return Selection(last.tokens, rows[last.indices], nearest(left, last)[belongs], **merged)


def joined(images: list[VisualTokens]) -> VisualTokens:
    """Return images as frames of one video, by hand."""
    names = ("features", "scores", "hidden", "keys", "cls_hidden", "cls_keys")
    parts: dict[str, Any] = {
        n: torch.cat([getattr(i, n) for i in images]) for n in names if getattr(images[0], n) is not None
    }
    count = len(images[0].scores)
    cells = {name: torch.cat([getattr(i.layout, name) for i in images]) for name in ("y", "x")}
    frame = torch.arange(len(images)).repeat_interleave(count)
    grids = [grid for image in images for grid in image.grids]
    rows = torch.arange(len(frame))
    video: dict[str, Any] = {
        "candidates": rows,
        "layout": Layout(frame, **cells, frame=frame),
        "grids": grids,
        "modality": "video",
    }
    return VisualTokens(**parts, **video, slots=len(rows))


def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).logits
    return found


def encode(model: Any, inputs: dict[str, Any]) -> list[VisualTokens]:
    with torch.no_grad():
        return get_adapter(model).encode(inputs, StageTimer(model.device))


def places(handle: Any, video: VisualTokens) -> list[int]:
    """Return the kept tokens, counted over all frames."""
    found, size = [], video.grids[0][0] * video.grids[0][1]
    several = len(handle.last) > 1
    for number, last in enumerate(handle.last):
        at, frame = last.selection.indices, last.layout.tile + (number if several else 0)
        found += (frame * size + last.layout.y * video.grids[0][1] + last.layout.x)[at].tolist()
    return found


def check(model: Any, inputs: dict[str, Any], video: VisualTokens, scope: str) -> None:
    for name in METHODS:
        for attention in ("plain", "proportional"):
            method = get_method(name, keep=KEEP)
            expected = by_hand(method, video, CHUNK)
            options: dict[str, Any] = {"scope": scope, "attention": attention}
            with Fixed(keep=KEEP, selection=expected)(model, **options):
                wanted = logits(model, inputs)
            with method(model, chunk=CHUNK, **options) as handle:
                found = logits(model, inputs)
            assert places(handle, video) == expected.indices.tolist(), name
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, msg=f"{name}, {attention}")
    for attention in ("plain", "proportional"):
        with ClustRS(keep=KEEP)(model, scope=scope, attention=attention):
            whole = logits(model, inputs)
        with ClustRS(keep=KEEP)(model, scope=scope, attention=attention, chunk=FRAMES):
            assert torch.equal(logits(model, inputs), whole), "one chunk is the whole video"


@pytest.mark.parametrize("family", VIDEOS)
def test_videos_in_chunks(load_family: LoadFamily, family: str) -> None:
    model, processor = load_family(family)
    inputs = video_inputs(family, model, processor)
    (video,) = encode(model, inputs)
    check(model, inputs, video, "image")
    for keep in (1.0, 1000):
        with ClustRS(keep=keep)(model, chunk=CHUNK):
            torch.testing.assert_close(logits(model, inputs), logits(*untouched(load_family, family)))
    with ClustRS(keep=2)(model, scope="frame"):
        whole = logits(model, inputs)
    with ClustRS(keep=2)(model, scope="frame", chunk=CHUNK):
        torch.testing.assert_close(logits(model, inputs), whole)
    expected = by_hand(ClustRS(keep=0.3), video, CHUNK, again=False)
    with ClustRS(keep=0.3)(model, chunk=CHUNK) as handle:
        logits(model, inputs)
    assert places(handle, video) == expected.indices.tolist(), "of a fraction, each chunk keeps its part"


def untouched(load_family: LoadFamily, family: str) -> tuple[Any, dict[str, Any]]:
    model, processor = load_family(family)
    inputs = video_inputs(family, model, processor)
    if family == "gemma4" and "num_frames_per_video" not in signature(model.model.get_video_features).parameters:
        stacked = {name: inputs[name][None] for name in ("pixel_values_videos", "video_position_ids")}
        inputs = {**inputs, **stacked}  # as transformers 5.18 has frames
        del inputs["num_frames_per_video"]
    return model, inputs


@pytest.mark.parametrize("family", IMAGES)
def test_frames_as_images_in_chunks(load_family: LoadFamily, family: str) -> None:
    model, processor = load_family(family)
    inputs = frame_inputs(family, model, processor)
    check(model, inputs, joined(encode(model, inputs)), "video")
    with ClustRS(keep=KEEP)(model, scope="video", chunk=CHUNK) as handle:
        logits(model, frame_inputs(family, model, processor, (FRAMES, 3)))
        together = [last.kept for last in handle.last]
        logits(model, inputs)
        kept = [last.kept for last in handle.last]
    assert together[:FRAMES] == kept, "other prompts of a batch do not move the chunks"
    assert sum(together[FRAMES:]) == KEEP


def test_a_question_is_read_for_every_chunk(load_family: LoadFamily) -> None:
    model, processor = load_family("qwen2_vl")
    inputs = video_inputs("qwen2_vl", model, processor)
    (video,) = encode(model, inputs)
    method = get_method("cdpruner", keep=KEEP)
    asked = torch.tensor([50, 51])
    question = model.get_input_embeddings()(asked).detach()
    left = []
    for start in range(0, FRAMES, CHUNK):
        rows = ((video.layout.tile >= start) & (video.layout.tile < start + CHUNK)).nonzero()[:, 0]
        left.append(rows[method.select(video.tokens[rows], question=question).indices])
    rows = torch.cat(left)
    expected = rows[method.select(video.tokens[rows], question=question).indices]
    with method(model, processor=processor, question=asked, chunk=CHUNK) as handle:
        logits(model, inputs)
    assert places(handle, video) == expected.tolist()


def test_an_image_and_two_videos(load_family: LoadFamily) -> None:
    """Images are encoded as ever, a video of one chunk too."""
    model, processor = load_family("qwen3_vl")
    videos = qwen.video_inputs(model.config, [(FRAMES, 2, 3), (2, 3, 2)], timestamps=True)
    image = frame_inputs("qwen3_vl", model, processor, (1,))
    inputs = {**image, **videos}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = torch.cat([videos[name], image[name]], 1)
    with ClustRS(keep=3)(model, chunk=CHUNK) as handle:
        logits(model, inputs)
        found = handle.last
    with ClustRS(keep=3)(model) as handle:
        logits(model, inputs)
    assert [last.kept for last in found] == [3, 3, 3]
    assert [len(last.scores) for last in found] == [len(handle.last[0].scores), 9, 12]
    for i in (0, 2):
        assert torch.equal(found[i].selection.indices, handle.last[i].selection.indices)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "gemma4", "internvl"])
def test_memory_does_not_grow_with_the_frames(load_family: LoadFamily, family: str) -> None:
    model, processor = load_family(family)
    options: dict[str, Any] = {"scope": "video" if family == "internvl" else "image"}
    most: dict[tuple[int, int | None], int] = {}
    for frames in (32, 128):
        if family == "internvl":
            inputs = frame_inputs(family, model, processor, (frames,))
        else:
            inputs = video_inputs(family, model, processor, frames)
        for chunk in (8, None):
            with ClustRS(keep=4)(model, chunk=chunk, **options), Peak() as peak:
                logits(model, inputs)
            most[frames, chunk] = peak.most
    assert most[128, 8] < 1.25 * most[32, 8], most
    assert most[128, None] > 2 * most[32, None], most


def test_what_cannot_be_chunked(load_family: LoadFamily) -> None:
    model, processor = load_family("llava_next")
    inputs = frame_inputs("llava_next", model, processor)
    with (
        ClustRS(keep=4)(model, scope="video", chunk=2),
        pytest.raises(ValueError, match="chunk must be None for frames"),
    ):
        logits(model, inputs)
    for wrong in (0, 1.5, "8", True):
        with pytest.raises(ValueError, match="chunk must be an integer of at least 1"):
            ClustRS(keep=4)(model, chunk=wrong)
    with ClustRS(keep=4)(model, chunk=2) as handle, pytest.raises(ValueError, match="encoded already"):
        handle.forward(encode(model, inputs), input_ids=inputs["input_ids"])
    with NoPruning()(model, chunk=2):
        pruned = logits(model, inputs)
    torch.testing.assert_close(pruned, logits(model, inputs))
