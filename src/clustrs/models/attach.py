"""Attach a method to a transformers model, and remove it.

While it is attached, `forward` and `generate` are called with two things changed: the image features are already there
and have k rows per image (`mm_encoder_outputs`), and the prompt is compacted to fit. All else is the model's own.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models import prompt as prompts
from clustrs.models import scoring, turns
from clustrs.models.adapters.base import Adapter, Modality, VisualTokens, get_adapter
from clustrs.models.prompt import Compaction, PrunedImage, checked_ids, compact, compact_arguments, given_as
from clustrs.models.scoring import StageTimer
from clustrs.models.select import ImageSelection, prune_images
from clustrs.models.turns import Turn, moved_indices
from clustrs.pruners.base import Pruner
from clustrs.validation import Attention, Crops, Deepstack, Positions, Scope

MARK = "_clustrs_handle"
CORRUPT_BIAS = {("flex_attention", "cpu")}
"""Implementations and devices where a bias breaks torch's kernel (2.13: memory is corrupted)."""
MODALITIES: tuple[Modality, ...] = ("image", "video")


class PrunedOutputs(dict[str, Any]):
    """Pruned `mm_encoder_outputs`."""


@dataclass(frozen=True)
class Results:
    """Selections and seconds of one call."""

    last: list[ImageSelection]
    seconds: dict[str, float]


def unwrap(model: Any) -> Any:
    """Return the transformers model inside a pipeline, PEFT, DistributedDataParallel or torch.compile."""
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


def resolve_auto(
    family: type[Adapter], implementation: str | None, device: str, positions: Positions, attention: Attention
) -> tuple[Literal["compact", "original"], Literal["plain", "proportional"]]:
    """Return the positions and the attention to use in a family, by the attention implementation and type of device."""
    if family.positions is not Adapter.positions:
        positions = "original"
    name = implementation or "sdpa"
    takes_bias = not ("flash" in name or "paged" in name or (name, device) in CORRUPT_BIAS)
    if attention == "proportional" and not takes_bias:
        raise ValueError(
            f"attention must be 'plain' or 'auto' with attn_implementation={name!r} on {device}, which has no bias for "
            "keys (proportional attention needs sdpa, eager, or flex_attention on an accelerator)"
        )
    automatic: Literal["plain", "proportional"] = "proportional" if takes_bias else "plain"
    return family.auto_positions if positions == "auto" else positions, automatic if attention == "auto" else attention


class Wrapper:
    """Replacement for a method of the model. Once its handle is removed it only calls the original, whoever still holds
    it. A deep copy of the model has a wrapper and a handle of its own."""

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
        """Return all arguments by name."""
        if not args:
            return dict(kwargs)
        bound = dict(self.signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        return bound


class Handle:
    """A method attached to a model, as `method.attach(model)` returns it.

    `remove`, or leaving the `with` block, restores the model.

    Args:
        method: The pruning method.
        model: A transformers model, or a pipeline, PEFT model or other wrapper around one.
        scope: "image" has one budget for all crops of an image, "crop" one for each.
        crops: "base" feeds the whole image alone, where a family has crops.
        positions: "compact" counts positions without gaps, "original" keeps each survivor's own, "auto" as it fits.
        attention: "proportional" lets a survivor count as the tokens it stands for, "auto" where that is possible.
        deepstack: "shrunk" shrinks further feature planes as the tokens are, where a family has them.

    Attributes:
        positions: Positions in use, "compact" or "original"; families that compute their own (M-RoPE) keep them.
        attention: Attention in use, "plain" or "proportional".
        last: Selections of the last call of this thread, one `ImageSelection` for each image.
        seconds: Seconds of vision tower, scoring and selection in that call.

    Raises:
        ValueError: For a model that is not supported or has a method attached.

    Examples:
        >>> from clustrs import ClustRS
        >>> from clustrs.models.load import load_model
        >>> model, processor = load_model("mini-llava")
        >>> handle = ClustRS(keep=16).attach(model)
        >>> handle.attached
        True
        >>> handle.remove()
    """

    def __init__(
        self,
        method: Pruner,
        model: Any,
        *,
        scope: Scope,
        crops: Crops,
        positions: Positions,
        attention: Attention,
        deepstack: Deepstack,
    ) -> None:
        validation.choice("scope", scope, ("image", "crop"))
        validation.choice("crops", crops, ("all", "base"))
        validation.choice("positions", positions, get_args(Positions))
        validation.choice("attention", attention, get_args(Attention))
        validation.choice("deepstack", deepstack, ("raw", "shrunk"))
        self.method, self.scope, self.crops, self.deepstack = method, scope, crops, deepstack
        self.model = unwrap(model)
        self.adapter = get_adapter(self.model)
        decoder = self.model.get_decoder()
        where = getattr(decoder.config, "_attn_implementation", None), next(decoder.parameters()).device.type
        self.positions, self.attention = resolve_auto(type(self.adapter), *where, positions, attention)
        if deepstack == "shrunk" and not self.adapter.has_planes:
            kind = self.adapter.config.model_type
            raise ValueError(
                f"deepstack must be 'raw' for a {kind} model, which has no deepstack features, got 'shrunk'"
            )
        self.inner: Any = self.adapter.inner
        if MARK in self.model.__dict__ or MARK in self.inner.__dict__:
            raise ValueError("a method is attached to this model already: remove it first (handle.remove())")
        self.attached = True
        self._thread = threading.local()
        self._latest = Results([], {})
        self._layer = self.adapter.scoring_layer()
        scoring.hook(self._layer)
        self._hooks: list[Any] = []
        if self.attention == "proportional":
            self._hooks = scoring.hook_attention(decoder)
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
        """Restore the model; what others have set meanwhile stays. Calling it twice does no harm."""
        if self.attached:
            self.attached = False
            scoring.unhook(self._layer)
            for one in self._hooks:
                one.remove()
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
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("scope", "crops", "positions", "attention"))
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
        """Selections of the last call, one for each image; of this thread's calls, if it made any."""
        return self._current().last

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of vision tower, scoring and selection in that call; NaN on an accelerator outside `timing`."""
        return self._current().seconds

    @contextmanager
    def _inside(self, caller: prompts.CallerPrompt | None = None) -> Iterator[None]:
        """Mark calls that the model makes to itself in this thread: their arguments are pruned already.

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
        """Return whether the model is calling itself."""
        return not torch.compiler.is_compiling() and getattr(self._thread, "inside", False)

    def _current(self) -> Results:
        return getattr(self._thread, "results", self._latest)

    def call_forward(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward` with pruned images; later steps on the cache of a pruned prompt get a mask that fits."""
        arguments = wrapper.arguments(args, kwargs)
        if not self._has_images(arguments):
            turn = self._turn(arguments)
            if turn is not None:
                turn.continue_forward(arguments, self.adapter.first_position)
                with self._inside(), self._biased(turn):
                    return wrapper.original(**arguments)
            return wrapper.original(*args, **kwargs)
        prompt = checked_ids(arguments)
        mask = arguments.get("attention_mask")
        pad_left = mask is not None and not torch.compiler.is_compiling() and bool((mask[:, 0] == 0).any())
        given, family = arguments.pop("position_ids", None), self.adapter.positions(arguments)
        compaction = self.prune(arguments, pad_left)
        positions = self._set_positions(arguments, compaction, given, prompt, family=family)
        if arguments.get("logits_to_keep") is not None:
            arguments["logits_to_keep"] = moved_indices(arguments["logits_to_keep"], compaction)
        turn = self._first_turn(prompt, compaction, positions)
        with self._inside(), self._biased(turn):
            out = wrapper.original(**arguments)
        turns.remember(getattr(out, "past_key_values", None), turn)
        return out

    def call_generate(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `generate` with pruned images, without gradients."""
        inputs, *rest = args or (None,)
        arguments = {**kwargs, "input_ids": inputs} if inputs is not None else dict(kwargs)
        has_images = self._has_images(arguments)
        turn = self._turn(arguments)
        if not has_images and turn is None:
            return wrapper.original(*args, **kwargs)
        if rest:
            raise ValueError("generate: pass arguments other than input_ids by keyword while a method is attached")
        return self.generate(None, original=wrapper.original, **arguments)

    def call_builder(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the logits processors or stopping criteria of a `generate` call for the caller's prompt."""
        caller = getattr(self._thread, "caller", None) if self.attached else None
        if caller is None:
            return wrapper.original(*args, **kwargs)
        arguments = wrapper.arguments(args, kwargs)
        if wrapper.name == "_get_logits_processor":
            return caller.logits_processors(wrapper.original, arguments)
        self._thread.caller = None  # whatever else this thread generates meanwhile has a prompt of its own
        return caller.stopping_criteria(wrapper.original, arguments)

    @torch.no_grad()
    def generate(
        self, encoded: list[VisualTokens] | None, *, original: Callable[..., Any] | None = None, **arguments: Any
    ) -> Any:
        """Call the model's `generate` with encoded images, one for each image of the prompts, in order."""
        prompts.refuse_unsupported(arguments)
        original = original or self._original_generate()
        prompt = checked_ids(arguments)
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
        cache = arguments.get("past_key_values")
        detached = nullcontext() if cache is None else turns.detached(cache)
        with self._inside(caller), self._biased(turn), detached:
            out = prompts.run(original, caller, arguments)
        cache = getattr(out, "past_key_values", cache)
        if cache is not None:
            turns.remember(cache, turn)
        return out

    def _original_generate(self) -> Callable[..., Any]:
        wrapper = self.model.__dict__.get("generate")
        return wrapper.original if isinstance(wrapper, Wrapper) else self.model.generate

    def _has_images(self, arguments: dict[str, Any]) -> bool:
        ready = arguments.get("mm_encoder_outputs")
        if ready and not isinstance(ready, PrunedOutputs):
            raise ValueError(
                "mm_encoder_outputs must be None while a method is attached: pass pixel_values, which can be pruned"
            )
        return not ready and any(arguments.get(name) is not None for name in self.adapter.pixel_arguments)

    def _refuse_cache(self, arguments: dict[str, Any]) -> None:
        cache = arguments.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                "past_key_values: images can't be added to a cache that holds something else than a prompt which was "
                "pruned by this handle; leave the cache out"
            )

    def prune(self, arguments: dict[str, Any], pad_left: bool, encoded: list[VisualTokens] | None = None) -> Compaction:
        """Encode and prune the images; compact the prompt and all per-token arguments, in place."""
        self._refuse_cache(arguments)
        ids = arguments["input_ids"]
        timer = StageTimer(ids.device)
        if encoded is None:
            encoded = self.adapter.encode(arguments, timer, self.crops)
        with timer.time("selection"):
            kept, last = prune_images(
                self.method, encoded, self.scope, self.deepstack, sizes=self.attention == "proportional"
            )
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
        compact_arguments(arguments, compaction, prompts.pad_id(self.model, avoid=[token for token, _ in images]))
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
            kept = compaction.positions(family if given is None else given_as(given, family))
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

    def _turn(self, arguments: dict[str, Any]) -> Turn | None:
        """Return what the cache of a call holds, on the device of the new tokens; None if its prompt was not pruned."""
        cache = arguments.get("past_key_values")
        turn = None if cache is None else turns.recall(cache)
        if turn is not None and turn.compaction.log_sizes is not None and self.attention == "plain":
            raise ValueError(
                "past_key_values needs attention='proportional', with which its prompt was read, got 'plain'"
            )
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        if turn is None or given is None or turn.input_ids.device == given.device:
            return turn
        return turn.map(lambda tensor: tensor.to(given.device))

    def _biased(self, turn: Turn) -> Any:
        """Let visual tokens count as many times as they should in the calls of a block."""
        logs = turn.compaction.log_sizes
        return nullcontext() if logs is None else scoring.biased(scoring.KeyBias(logs))

    def _first_turn(self, prompt: Tensor, compaction: Compaction, positions: Tensor | None) -> Turn:
        return Turn(prompt, compaction, positions, compact_positions=self.positions == "compact")

    def _next_turn(self, turn: Turn, arguments: dict[str, Any]) -> Turn:
        """Compact the longer prompt of the next turn as the cache is."""
        mask, config = arguments["attention_mask"], self.adapter.config
        placeholders = [self.adapter.placeholder(m) for m in MODALITIES if hasattr(config, f"{m}_token_id")]
        after = turn.continue_prompt(arguments["input_ids"], mask, placeholders)
        for name in (*self.adapter.pixel_arguments, *self.adapter.vision_kwargs):
            arguments.pop(name, None)
        compact_arguments(arguments, after.compaction, prompts.pad_id(self.model, avoid=placeholders))
        if after.positions is not None:
            self.adapter.set_position_ids(arguments, after.compaction, after.positions)
        elif not turn.compact_positions:
            arguments["position_ids"] = after.compaction.positions((mask.cumsum(-1) - 1).clamp(min=0))
        return after
