"""Attach a method to a transformers model, and take it off again.

While it is attached, `forward` and `generate` prune: the image features come out with k rows a image, and the
placeholders in the prompt, and all that runs along with them, are compacted to fit. Everything else is the model's own.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models import generation
from clustrs.models.candidates import FAMILIES, Candidates, Clock, opener, video_frames
from clustrs.models.compaction import Kept, Prompts, compact
from clustrs.models.select import choose
from clustrs.pruners import checks
from clustrs.pruners.base import Pruner
from clustrs.pruners.selection import Selection

MARK = "_clustrs_handle"
MISSING_IDS = "input_ids is missing: the placeholders of the images are found in it"
PIXELS = ("pixel_values", "pixel_values_videos")
CONSUMED = (*PIXELS, "image_sizes", "batch_num_images", "vision_feature_layer", "vision_feature_select_strategy")
"""Arguments that are used up when the images are encoded."""
FOLLOWERS = {"labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}
"""Per-token arguments that are compacted along with the prompt, and what they have on padding."""


@dataclass(frozen=True)
class ImageSelection:
    """What was kept of one image (or video), and where it lies.

    `attention`, `crop`, `row` and `column` [N] belong to the tokens that could be kept: their scores, the crop (or
    frame) they are in, and their place in its grid. `grids` has the rows and columns of each crop; crop 0 is the whole
    image. `placeholders` is how many visual tokens the model would have been fed, `kept` how many it was.
    """

    selection: Selection
    attention: Tensor
    crop: Tensor
    row: Tensor
    column: Tensor
    grids: list[tuple[int, int]]
    placeholders: int
    kept: int


def unwrap(model: Any) -> Any:
    """The transformers model inside PEFT, DistributedDataParallel or torch.compile."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


class Handle:
    """A method attached to a model. `remove` (or leaving the `with` block) puts the model back as it was."""

    def __init__(self, method: Pruner, model: Any, *, scope: str, crops: str, positions: str) -> None:
        validation.choice("scope", scope, ("image", "crop"))
        validation.choice("crops", crops, ("all", "base"))
        validation.choice("positions", positions, ("compact", "original"))
        self.method, self.scope, self.crops, self.positions = method, scope, crops, positions
        self.model = unwrap(model)
        kind = getattr(getattr(self.model, "config", None), "model_type", type(self.model).__name__)
        self.inner: Any = getattr(self.model, "model", self.model)
        if kind not in FAMILIES or not hasattr(self.inner, "vision_tower"):
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"a model of type {kind!r} is not supported: known are {known}; for others use select(...)"
            )
        if MARK in self.model.__dict__ or MARK in self.inner.__dict__:
            raise ValueError("a method is attached to this model already: remove it first (handle.remove())")
        self.open = opener(kind, crops)
        self.ready: list[Candidates] | None = None
        """The images of the next call, already encoded, one for each placeholder in order; `vlm.sharing` sets it."""
        self.last: list[ImageSelection] = []
        self.seconds: dict[str, float] = {}
        self._before: list[tuple[Any, str, Any]] = []
        for module, name, wrapper in self._doors():
            self._before.append((module, name, module.__dict__.get(name)))
            setattr(module, name, wrapper)
        for module in {id(m): m for m in (self.model, self.inner)}.values():
            self._before.append((module, MARK, None))
            module.__dict__[MARK] = self

    def remove(self) -> None:
        """Put the model back exactly as it was. Doing so twice does no harm."""
        while self._before:
            module, name, before = self._before.pop()
            if before is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _doors(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        doors = [(self.inner, "forward", self._forward(self.inner.forward))]
        if self.model is not self.inner:
            doors.append((self.model, "forward", self._forward(self.model.forward)))
            doors.append((self.model, "generate", self._generate(self.model.generate)))
        return doors

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        rest = next(p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
            arguments.update(arguments.pop(rest, {}))
            if not self._has_images(arguments):
                return original(*args, **kwargs)
            mask = arguments.get("attention_mask")
            pad_left = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 0] == 0).any())
            given = arguments.pop("position_ids", None)
            prompts = self._prune(arguments, pad_left, positions=given)
            if self.positions == "original":
                arguments["position_ids"] = prompts.original
            elif given is not None:
                arguments["position_ids"] = prompts.original - prompts.moved
            arguments.update(inputs_embeds=prompts.inputs_embeds, attention_mask=prompts.attention_mask)
            return original(**arguments)

        return forward

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._has_images(kwargs):
                return original(inputs, *args, **kwargs) if inputs is not None else original(*args, **kwargs)
            if args:
                raise ValueError("generate: give everything but the prompt by name while a method is attached")
            if inputs is not None:
                kwargs["input_ids"] = inputs
            ids = kwargs.get("input_ids")
            config = generation.effective(self.model, kwargs)
            if not isinstance(ids, Tensor):
                raise ValueError(MISSING_IDS)
            if kwargs.get("attention_mask") is None:
                kwargs["attention_mask"] = generation.default_mask(ids, config)
            given = kwargs.pop("position_ids", None)
            counted = given if given is not None else (kwargs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            prompts = self._prune(kwargs, pad_left=True, positions=counted)
            if self.positions == "original":
                kwargs["position_ids"] = prompts.original
            elif given is not None:
                kwargs["position_ids"] = prompts.original - prompts.moved
            kwargs.update(input_ids=prompts.input_ids, inputs_embeds=prompts.inputs_embeds)
            kwargs.update(attention_mask=prompts.attention_mask)
            return generation.run(original, self.model, ids, prompts.input_ids, kwargs)

        return generate

    def _has_images(self, arguments: dict[str, Any]) -> bool:
        if arguments.get("mm_encoder_outputs"):
            raise ValueError("mm_encoder_outputs: ready-made features can't be pruned, give pixel_values")
        return self.ready is not None or any(arguments.get(name) is not None for name in PIXELS)

    def _prune(self, arguments: dict[str, Any], pad_left: bool, positions: Tensor | None) -> Prompts:
        """Encode and prune the images, compact the prompt; takes out of `arguments` what is used up.

        `positions` are the position ids of the whole prompt; None means that they count from 0.
        """
        ids = arguments.pop("input_ids", None)
        if not isinstance(ids, Tensor):
            raise ValueError(MISSING_IDS)
        if arguments.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds: give input_ids alone, with images")
        mask = arguments.get("attention_mask")
        if mask is not None and (mask.dim() != 2 or mask.shape != ids.shape):
            raise ValueError(f"attention_mask has shape {checks.shape(mask)}: {checks.shape(ids)} goes with input_ids")
        cache = arguments.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError("past_key_values: images can't be added to a cache that holds something")
        clock = Clock(ids.device)
        self.last = []
        images = []
        for pixels, token, opened in (
            ("pixel_values", "image_token_id", self.open),
            ("pixel_values_videos", "video_token_id", video_frames),
        ):
            ready = self.ready if pixels == "pixel_values" else None
            if ready is not None or arguments.get(pixels) is not None:
                candidates = opened(self.inner, arguments, clock) if ready is None else ready
                with clock.time("selection"):
                    kept = self._keep(candidates, video=opened is video_frames)
                images.append((getattr(self.inner.config, token), kept))
        self.ready, self.seconds = None, clock.seconds
        for name in CONSUMED:
            arguments.pop(name, None)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        embeddings = self.inner.get_input_embeddings()(ids)
        prompts = compact(
            ids,
            embeddings,
            mask,
            images,
            positions=positions.expand_as(ids),
            pad_id=generation.pad_id(self.model, avoid=[token for token, _ in images]),
            pad_left=pad_left,
        )
        for name, filler in FOLLOWERS.items():
            if arguments.get(name) is not None:
                arguments[name] = prompts.follow(arguments[name], filler)
        return prompts

    def _keep(self, candidates: list[Candidates], video: bool) -> list[Kept]:
        scope = "image" if video else self.scope
        different = list({id(image): image for image in candidates}.values())
        chosen = choose(self.method, different, self.inner.multi_modal_projector, scope=scope)
        choice = {id(image): one for image, one in zip(different, chosen, strict=True)}
        kept = []
        for image in candidates:
            selection, everything = choice[id(image)]
            if everything:
                places = torch.arange(len(image.whole), device=image.whole.device)
                rows = image.whole
            else:
                places = image.rows[selection.indices.clamp(min=0)]
                rows = selection.tokens
            kept.append(Kept(rows, places, image.placeholders))
            self.last.append(
                ImageSelection(
                    selection,
                    attention=image.attention,
                    crop=image.crop,
                    row=image.row,
                    column=image.column,
                    grids=image.grids,
                    placeholders=image.placeholders,
                    kept=len(rows),
                )
            )
        return kept
