"""Attach a method to a transformers model, and take it off again.

While it is attached, `forward` and `generate` are called with two things changed: the image features are already there
and have k rows per image (`mm_encoder_outputs`), and the prompt is compacted to fit. All else is the model's own.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models import prompt as prompts
from clustrs.models import scoring, turns
from clustrs.models.adapters import VisualTokens, get_adapter
from clustrs.models.adapters.base import Modality
from clustrs.models.prompt import Compaction, PrunedImage, compact, take_slots
from clustrs.models.scoring import StageTimer
from clustrs.models.select import select_tokens, shrink_planes
from clustrs.models.turns import Turn, moved_indices
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import Layout, Selection
from clustrs.validation import Crops, Deepstack, Positions, Scope

MARK = "_clustrs_handle"
MODALITIES: tuple[Modality, ...] = ("image", "video")
MISSING_IDS = "input_ids is missing: the placeholders of the images are found in it"
FOLLOWERS = {"labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}
"""Per-token arguments that are compacted along with the prompt, and what they have on padding."""


@dataclass(frozen=True)
class ImageSelection:
    """Kept tokens of one image (or video), and their positions.

    `scores` and `layout` belong to the tokens that could be kept. `grids` has the height and width of each tile in
    tokens; tile 0 is the whole image (or the first frame). `placeholders` is how many visual tokens the model would
    have been fed, `kept` how many it was. `columns` is how many of the other tiles lie side by side, where the family
    says so.
    """

    selection: Selection
    scores: Tensor
    layout: Layout
    grids: list[tuple[int, int]]
    placeholders: int
    kept: int
    columns: int | None = None
    modality: Modality = "image"


class PrunedOutputs(dict[str, Any]):
    """`mm_encoder_outputs` that are pruned already."""


@dataclass(frozen=True)
class Results:
    """What one call kept of each image, and its seconds."""

    last: list[ImageSelection]
    seconds: dict[str, float]


def unwrap(model: Any) -> Any:
    """The transformers model inside a pipeline, PEFT, DistributedDataParallel or torch.compile."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
            model = model.model
        else:
            return model


class Wrapper:
    """Stands in the place of a model's `forward` or `generate`. Once its handle is removed it does nothing of its own,
    whoever still holds it. A deep copy of the model has a wrapper and a handle of its own."""

    def __init__(self, handle: "Handle", module: Any, name: str) -> None:
        self.handle, self.name = handle, name
        self.original: Callable[..., Any] = getattr(module, name)
        self.signature = inspect.signature(self.original)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith("_get_"):
            return self.handle.call_builder(self, args, kwargs)
        if not self.handle.attached or self.handle.nested():
            return self.original(*args, **kwargs)
        call = self.handle.call_forward if self.name == "forward" else self.handle.call_generate
        return call(self, args, kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        if not args:
            return dict(kwargs)
        bound = dict(self.signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        return bound


class Handle:
    """A method attached to a model. `remove` (or leaving the `with` block) puts the model back as it was.

    `last` and `seconds` are those of the last call in this thread: what was kept of each image, and how long vision
    tower, scoring and selection took.
    """

    def __init__(
        self,
        method: Pruner,
        model: Any,
        *,
        scope: Scope,
        crops: Crops,
        positions: Positions,
        deepstack: Deepstack = "raw",
    ) -> None:
        validation.choice("scope", scope, ("image", "crop"))
        validation.choice("crops", crops, ("all", "base"))
        validation.choice("positions", positions, ("compact", "original"))
        validation.choice("deepstack", deepstack, ("raw", "shrunk"))
        self.method, self.scope, self.crops, self.positions = method, scope, crops, positions
        self.deepstack = deepstack
        self.model = unwrap(model)
        self.adapter = get_adapter(self.model)
        if deepstack == "shrunk" and not self.adapter.has_planes:
            kind = self.adapter.config.model_type
            raise ValueError(f"deepstack='shrunk': a {kind} model has no deepstack features; leave it out")
        self.inner: Any = self.adapter.inner
        if MARK in self.model.__dict__ or MARK in self.inner.__dict__:
            raise ValueError("a method is attached to this model already: remove it first (handle.remove())")
        self.attached = True
        self._thread = threading.local()
        self._latest = Results([], {})
        self._layer = self.adapter.scoring_layer()
        scoring.hook(self._layer)
        self._before: list[tuple[Any, str, Any, Any]] = []
        wrapped = [(self.inner, "forward")]
        if self.model is not self.inner:
            wrapped += [(self.model, "forward"), (self.model, "generate")]
        for module, name in wrapped:
            self._put(module, name, Wrapper(self, module, name))
        if self.model is not self.inner:
            for name in ("_get_logits_processor", "_get_stopping_criteria"):
                self._put(self.model, name, Wrapper(self, self.model, name))
        for module in {id(m): m for m in (self.model, self.inner)}.values():
            self._put(module, MARK, self)

    def _put(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, module.__dict__.get(name), value))
        module.__dict__[name] = value

    def remove(self) -> None:
        """Put the model back exactly as it was; what others have set meanwhile stays. Doing so twice does no harm."""
        if self.attached:
            self.attached = False
            scoring.unhook(self._layer)
        while self._before:
            module, name, before, ours = self._before.pop()
            if module.__dict__.get(name) is not ours:
                continue
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

    def __repr__(self) -> str:
        state = "attached to" if self.attached else "removed from"
        options = f"scope={self.scope!r}, crops={self.crops!r}, positions={self.positions!r}"
        return f"<Handle: {self.method!r} {state} {type(self.model).__name__}, {options}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with a method attached cannot be pickled: call handle.remove() first, or store the weights alone "
            "with model.save_pretrained(folder) or torch.save(model.state_dict(), file)"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies: they start without results."""
        state = dict(self.__dict__)
        for name in ("_thread", "_latest"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._thread = threading.local()
        self._latest = Results([], {})

    @property
    def last(self) -> list[ImageSelection]:
        """What the last call kept of each image; of this thread's calls, if it made any."""
        return self._current().last

    @property
    def seconds(self) -> dict[str, float]:
        """How long vision tower, scoring and selection took in that call; on an accelerator NaN outside `timing`."""
        return self._current().seconds

    @contextmanager
    def _inside(self, caller: prompts.CallerPrompt | None = None) -> Iterator[None]:
        """Marks calls that the model makes of itself in this thread: what they are given is pruned already.

        `caller` is the prompt as it was given to `generate`.
        """
        if torch.compiler.is_compiling():
            yield
            return
        before = getattr(self._thread, "inside", False), getattr(self._thread, "caller", None)
        self._thread.inside, self._thread.caller = True, caller
        try:
            yield
        finally:
            self._thread.inside, self._thread.caller = before

    def nested(self) -> bool:
        """Whether the model is calling itself."""
        return not torch.compiler.is_compiling() and getattr(self._thread, "inside", False)

    def _current(self) -> Results:
        return getattr(self._thread, "results", self._latest)

    def call_forward(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward` with its images pruned; later steps with the cache of a pruned prompt get a mask that fits."""
        arguments = wrapper.arguments(args, kwargs)
        if not self._has_images(arguments):
            turn = self._turn(arguments)
            if turn is not None:
                turn.continue_forward(arguments, self.adapter.first_position)
                with self._inside():
                    return wrapper.original(**arguments)
            return wrapper.original(*args, **kwargs)
        prompt = self._checked_ids(arguments)
        mask = arguments.get("attention_mask")
        pad_left = mask is not None and not torch.compiler.is_compiling() and bool((mask[:, 0] == 0).any())
        given, family = arguments.pop("position_ids", None), self.adapter.positions(arguments)
        compaction = self.prune(arguments, pad_left)
        positions = self._set_positions(arguments, compaction, given, prompt, family=family)
        if arguments.get("logits_to_keep") is not None:
            arguments["logits_to_keep"] = moved_indices(arguments["logits_to_keep"], compaction)
        with self._inside():
            out = wrapper.original(**arguments)
        turns.remember(getattr(out, "past_key_values", None), self._first_turn(prompt, compaction, positions))
        return out

    def call_generate(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`generate` with the images of the prompt pruned, without gradients, as the model's own."""
        inputs, *rest = args or (None,)
        arguments = {**kwargs, "input_ids": inputs} if inputs is not None else dict(kwargs)
        has_images = self._has_images(arguments)
        turn = self._turn(arguments)
        if not has_images and turn is None:
            return wrapper.original(*args, **kwargs)
        if rest:
            raise ValueError("generate: give everything but the prompt by name while a method is attached")
        return self.generate(None, original=wrapper.original, **arguments)

    def call_builder(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `generate` builds from its settings: logits processors or stopping criteria, for the caller's prompt."""
        caller = getattr(self._thread, "caller", None) if self.attached else None
        if caller is None:
            return wrapper.original(*args, **kwargs)
        arguments = wrapper.arguments(args, kwargs)
        if wrapper.name == "_get_logits_processor":
            return caller.logits_processors(wrapper.original, arguments)
        return caller.stopping_criteria(wrapper.original, arguments)

    @torch.no_grad()
    def generate(
        self, encoded: list[VisualTokens] | None, *, original: Callable[..., Any] | None = None, **arguments: Any
    ) -> Any:
        """The model's `generate`, with images that are encoded already: one for each image of the prompts, in order."""
        prompts.refuse_unsupported(arguments)
        original = original or self._original_generate()
        prompt = self._checked_ids(arguments)
        if arguments.get("attention_mask") is None:
            config = prompts.effective(self.model, arguments)
            arguments["attention_mask"] = prompts.default_mask(prompt, config)
        turn = self._turn(arguments)
        if turn is not None:
            turn = self._next_turn(turn, arguments)
        else:
            arguments = {**self.adapter.image_arguments(encoded or []), **arguments}
            given, family = arguments.pop("position_ids", None), self.adapter.positions(arguments)
            mask = arguments["attention_mask"]
            compaction = self.prune(arguments, pad_left=True, encoded=encoded)
            counted = (mask.cumsum(-1) - 1).clamp(min=0) if self.positions == "original" else None
            positions = self._set_positions(arguments, compaction, given, prompt, counted, family)
            turn = self._first_turn(prompt, compaction, positions)
        width = arguments["input_ids"].shape[1]
        prompts.shorten(arguments, self.model, prompt.shape[1] - width)
        caller = prompts.CallerPrompt(prompt, width)
        with self._inside(caller), turns.detached(arguments.get("past_key_values")):
            out = prompts.run(original, caller, arguments)
        cache = getattr(out, "past_key_values", None)
        turns.remember(arguments.get("past_key_values") if cache is None else cache, turn)
        return out

    def _original_generate(self) -> Callable[..., Any]:
        wrapper = self.model.__dict__.get("generate")
        return wrapper.original if isinstance(wrapper, Wrapper) else self.model.generate

    def _has_images(self, arguments: dict[str, Any]) -> bool:
        ready = arguments.get("mm_encoder_outputs")
        if ready and not isinstance(ready, PrunedOutputs):
            raise ValueError("mm_encoder_outputs: ready-made features can't be pruned, give pixel_values")
        return not ready and any(arguments.get(name) is not None for name in self.adapter.pixel_arguments)

    def _checked_ids(self, arguments: dict[str, Any]) -> Tensor:
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if not isinstance(ids, Tensor):
            raise ValueError(MISSING_IDS)
        if arguments.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds: give input_ids alone, with images")
        if mask is not None and (mask.dim() != 2 or mask.shape != ids.shape):
            raise ValueError(f"attention_mask has shape {list(mask.shape)}: {list(ids.shape)} goes with input_ids")
        return ids

    def _refuse_cache(self, arguments: dict[str, Any]) -> None:
        cache = arguments.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                "past_key_values: images can't be added to a cache that holds something else than a prompt which was "
                "pruned by this handle; leave the cache out"
            )

    def prune(self, arguments: dict[str, Any], pad_left: bool, encoded: list[VisualTokens] | None = None) -> Compaction:
        """Encode and prune the images, compact the prompt and what runs along with it, in place.

        Gives how the prompt was compacted.
        """
        self._refuse_cache(arguments)
        ids = arguments["input_ids"]
        timer = StageTimer(ids.device)
        if encoded is None:
            encoded = self.adapter.encode(arguments, timer, self.crops)
        with timer.time("selection"):
            kept, last = self._keep(encoded)
        groups: dict[Modality, list[PrunedImage]] = {}
        for image, tokens in zip(encoded, kept, strict=True):
            groups.setdefault(image.modality, []).append(tokens)
        images = [(self.adapter.placeholder(modality), group) for modality, group in groups.items()]
        compaction = compact(ids, arguments.get("attention_mask"), images, pad_left=pad_left)
        self._latest = Results(last, timer.seconds)
        if not torch.compiler.is_compiling():
            self._thread.results = self._latest
        for name in (*self.adapter.pixel_arguments, *self.adapter.vision_kwargs):
            arguments.pop(name, None)
        arguments["mm_encoder_outputs"] = PrunedOutputs(
            {m: self.adapter.outputs(group, m) for m, group in groups.items()}
        )
        self._shorten(arguments, compaction, [token for token, _ in images])
        if torch.compiler.is_compiling():
            self._embed(arguments, images)
        return compaction

    def _embed(self, arguments: dict[str, Any], images: list[tuple[int, list[PrunedImage]]]) -> None:
        """Feed embeddings instead of ids and features: the model's own check that the two fit does not compile together
        with a selection (inductor of torch 2.13 fails on it)."""
        if any(tokens.planes is not None for _, group in images for tokens in group):
            raise ValueError("torch.compile: a model with several planes of visual features can't be compiled pruned")
        ids = arguments.pop("input_ids")
        del arguments["mm_encoder_outputs"]
        embeddings = self.inner.get_input_embeddings()(ids)
        for token, group in images:
            features = torch.cat([tokens.features for tokens in group]).to(embeddings)
            embeddings = embeddings.masked_scatter((ids == token)[..., None], features)
        arguments["inputs_embeds"] = embeddings

    def _shorten(self, arguments: dict[str, Any], compaction: Compaction, placeholders: list[int]) -> None:
        """Compact the ids and all that runs along with them."""
        shape = arguments["input_ids"].shape
        for name in FOLLOWERS:
            along = arguments.get(name)
            if along is not None and along.shape != shape:
                raise ValueError(f"{name} has shape {list(along.shape)}: {list(shape)} goes with input_ids")
        pad = prompts.pad_id(self.model, avoid=placeholders)
        arguments["input_ids"] = compaction.gather(arguments["input_ids"], pad)
        arguments["attention_mask"] = compaction.mask
        for name, filler in FOLLOWERS.items():
            if arguments.get(name) is not None:
                arguments[name] = compaction.gather(arguments[name], filler)

    def _set_positions(
        self,
        arguments: dict[str, Any],
        compaction: Compaction,
        given: Tensor | None,
        prompt: Tensor,
        counted: Tensor | None = None,
        family: Tensor | None = None,
    ) -> Tensor | None:
        """Set position ids for the compacted prompt, where the model would not count them right by itself.

        `given` are the caller's, `counted` what `generate` would count, `family` those that the family computes: then
        those of the survivors are returned, too.
        """
        if family is not None:
            kept = compaction.positions(family if given is None else _given_as(given, family))
            self.adapter.set_position_ids(arguments, compaction, kept)
            return kept
        if self.positions == "original":
            whole = given if given is not None else counted
            if whole is None:
                whole = torch.arange(prompt.shape[1], device=prompt.device) + self.adapter.first_position
            arguments["position_ids"] = compaction.positions(whole.expand(*whole.shape[:-2], *prompt.shape))
        elif given is not None:
            positions = compaction.gather(given.expand(*given.shape[:-2], *prompt.shape), 0)
            arguments["position_ids"] = positions - compaction.dropped
        self.adapter.set_position_ids(arguments, compaction, None)
        return None

    def _keep(self, encoded: list[VisualTokens]) -> tuple[list[PrunedImage], list[ImageSelection]]:
        """What is kept of each image; one that is asked about several times is selected from once."""
        different = list({id(image): image for image in encoded}.values())
        chosen = select_tokens(self.method, different, self.scope)
        results = {
            id(image): (self._kept(image, selection, everything), selection)
            for image, (selection, everything) in zip(different, chosen, strict=True)
        }
        kept, last = [], []
        for image in encoded:
            tokens, selection = results[id(image)]
            kept.append(tokens)
            count = len(tokens.features)
            last.append(
                ImageSelection(
                    selection.map(torch.Tensor.detach),
                    image.scores,
                    image.layout,
                    image.grids,
                    image.slots,
                    count,
                    image.columns,
                    image.modality,
                )
            )
        return kept, last

    def _kept(self, image: VisualTokens, selection: Selection, everything: bool) -> PrunedImage:
        if everything:
            slots = image.first_slot + torch.arange(len(image.features), device=image.features.device)
            return PrunedImage(image.features, slots, slots, image.slots, image.planes)
        tokens, indices = selection.tokens, selection.indices
        if image.runs is not None:
            order = image.runs[indices].argsort(stable=True)
            tokens, indices = tokens[order], indices[order]
        slots, own = take_slots(indices, image.candidates + image.first_slot, image.slots)
        planes = None if image.planes is None else image.planes[:, image.candidates[indices.clamp(min=0)]]
        if image.planes is not None and self.deepstack == "shrunk":
            planes = shrink_planes(image.planes[:, image.candidates], selection)
        return PrunedImage(tokens, slots, own, image.slots, planes)

    def _turn(self, arguments: dict[str, Any]) -> Turn | None:
        """What the cache of a call holds, if it is the cache of a pruned prompt, on the device of the new tokens."""
        cache = arguments.get("past_key_values")
        turn = None if cache is None else turns.recall(cache)
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        if turn is None or given is None or turn.input_ids.device == given.device:
            return turn
        return turn.map(lambda tensor: tensor.to(given.device))

    def _first_turn(self, prompt: Tensor, compaction: Compaction, positions: Tensor | None) -> Turn:
        return Turn(prompt, compaction, positions, compact_positions=self.positions == "compact")

    def _next_turn(self, turn: Turn, arguments: dict[str, Any]) -> Turn:
        """The next turn of a conversation: the longer prompt, compacted as the cache is."""
        mask, config = arguments["attention_mask"], self.adapter.config
        placeholders = [self.adapter.placeholder(m) for m in MODALITIES if hasattr(config, f"{m}_token_id")]
        after = turn.continue_prompt(arguments["input_ids"], mask, placeholders)
        for name in (*self.adapter.pixel_arguments, *self.adapter.vision_kwargs):
            arguments.pop(name, None)
        self._shorten(arguments, after.compaction, placeholders)
        if after.positions is not None:
            self.adapter.set_position_ids(arguments, after.compaction, after.positions)
        elif not turn.compact_positions:
            arguments["position_ids"] = after.compaction.positions((mask.cumsum(-1) - 1).clamp(min=0))
        return after


def _given_as(given: Tensor, family: Tensor) -> Tensor:
    """The caller's positions in the shape of the family's; a row in front that counts the text is counted anew."""
    return (given[-len(family) :] if given.dim() == family.dim() == 3 else given).expand_as(family)
