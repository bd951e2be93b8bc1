"""Attach a method to a transformers model, and remove it.

While it is attached, `forward` and `generate` are called with two things changed: the image features are already there
and have k rows per image (`mm_encoder_outputs`), and the prompt is compacted to fit. All else is the model's own.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models import inside, scoring, turns
from clustrs.models import prompt as prompts
from clustrs.models.adapters.base import Adapter, Modality, VisualTokens, get_adapter
from clustrs.models.inside import InsideCall
from clustrs.models.prompt import CallerPrompt, PrunedImage, checked_ids, compact, compact_arguments
from clustrs.models.select import ImageSelection, encode_chunks, prune_images, survivors
from clustrs.models.turns import Turn
from clustrs.pruners.base import Pruner
from clustrs.validation import Attention, Crops, Deepstack, Positions, Scope

MARK = "_clustrs_handle"
CORRUPT_BIAS = {("flex_attention", "cpu")}
"""Implementations and devices where a bias breaks torch's kernel (2.13: memory is corrupted)."""


class PrunedOutputs(dict[str, Any]):
    """Pruned `mm_encoder_outputs`."""


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
    """Replacement for a method of the model; without an attached handle it only calls the original."""

    def __init__(self, handle: "Handle", module: Any, name: str) -> None:
        self.handle, self.name = handle, name
        self.original: Callable[..., Any] = getattr(module, name)
        self.signature = inspect.signature(self.original)
        update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self.handle
        inside = not torch.compiler.is_compiling() and getattr(handle._thread, "inside", False)
        if not handle.attached or inside != self.name.startswith("_get_"):
            return self.original(*args, **kwargs)
        if self.name == "forward":
            return handle._forward(self, args, kwargs)
        return handle._generate(self, args, kwargs) if self.name == "generate" else handle._build(self, args, kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
        **options: The options of `Pruner.attach`, all of them.

    Attributes:
        positions: Positions in use, "compact" or "original"; families that compute their own (M-RoPE) keep them.
        attention: Attention in use, "plain" or "proportional".

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

    scope: Scope
    crops: Crops
    deepstack: Deepstack
    chunk: int | None

    def __init__(self, method: Pruner, model: Any, **options: Any) -> None:
        for name, kind in validation.CHOICES.items():
            validation.choice(name, options[name], get_args(kind))
        if options["chunk"] is not None:
            validation.integer("chunk", options["chunk"], 1)
        self.method = method
        for name in ("scope", "crops", "deepstack", "chunk"):
            setattr(self, name, options[name])
        self.model = unwrap(model)
        self.adapter = get_adapter(self.model)
        self.inner: Any = self.adapter.inner
        decoder = self.model.get_decoder()
        where = getattr(decoder.config, "_attn_implementation", None), next(decoder.parameters()).device.type
        asked = options["positions"], options["attention"]
        self.positions, self.attention = resolve_auto(type(self.adapter), *where, *asked)
        self._encoder_method, self._inside_method = method.parts()
        if method.where == "language model":  # nothing is dropped before it, and what it keeps stands for itself
            self.positions, self.attention = "original", "plain"
        family = self.adapter.config.model_type
        if getattr(self._inside_method, "compact", False) and type(self.adapter).positions is not Adapter.positions:
            raise ValueError(f"compact must be False for a {family} model, with M-RoPE positions")
        if self.deepstack == "shrunk" and not self.adapter.has_planes:
            raise ValueError(f"deepstack must be 'raw' for a {family} model, without such features, got 'shrunk'")
        self._reader, question = None, options["question"]
        if "question" in method.requirements():
            from clustrs.models.question import QuestionReader

            self._reader = QuestionReader(self.model, options["processor"], question, self.adapter.written_text)
        elif question is not None:
            raise ValueError(f"question must be None for {method.name}, which does not read it, got {question!r}")
        if MARK in self.model.__dict__ or MARK in self.inner.__dict__:
            raise ValueError("a method is attached to this model already: remove it first (handle.remove())")
        self._decoder = decoder
        self._hooks: list[Any] = [] if self._inside_method is None else inside.hook_layers(decoder, self._inside_method)
        if self.attention == "proportional":
            self._hooks += scoring.hook_attention(decoder)
        self.attached = True
        self._thread = threading.local()
        self._latest: tuple[list[ImageSelection], dict[str, float]] = [], {}
        self.adapter.records = method.requirements()
        self._hooks += map(scoring.Hook, self.adapter.hooked_layers())
        self._model_generate: Any = getattr(self.model, "generate", None)
        self._before: list[tuple[Any, str, Any, Any]] = []
        wrapped = [(self.inner, "forward")]
        if self.model is not self.inner:
            names = ("forward", "generate", "_get_logits_processor", "_get_stopping_criteria")
            wrapped += [(self.model, name) for name in names]
        ours: list[Any] = [(module, name, Wrapper(self, module, name)) for module, name in wrapped]
        if self._inside_method is not None and hasattr(decoder, "_deepstack_process"):
            ours.append((decoder, "_deepstack_process", partial(inside.add_deepstack, decoder._deepstack_process)))
        for module, name, value in (*ours, (self.model, MARK, self), (self.inner, MARK, self)):
            self._before.append((module, name, module.__dict__.get(name), value))
            module.__dict__[name] = value

    def remove(self) -> None:
        """Restore the model; what others have set meanwhile stays. Calling it twice does no harm."""
        if self.attached:
            self.attached = False
            for one in self._hooks:
                one.remove()
        while self._before:
            module, name, before, ours = self._before.pop()
            if module.__dict__.get(name) is ours:
                del module.__dict__[name]
                if before is not None:
                    module.__dict__[name] = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "attached to" if self.attached else "removed from"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("scope", "crops", "positions", "attention"))
        return f"<Handle: {self.method!r} {state} {type(self.model).__name__}, {options}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy starts without results."""
        copied = memo[id(self)] = object.__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in ("_thread", "_latest")}
        copied.__dict__.update(deepcopy(state, memo), _thread=threading.local(), _latest=([], {}))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with a method attached cannot be pickled: call handle.remove() first, or store the weights alone "
            "with model.save_pretrained(folder) or torch.save(model.state_dict(), file)"
        )

    @property
    def last(self) -> list[ImageSelection]:
        """Selections of the last call, one for each image; of this thread's calls, if it made any."""
        return getattr(self._thread, "results", self._latest)[0]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of vision tower, scoring and selection in that call; NaN on an accelerator outside `timing`."""
        return getattr(self._thread, "results", self._latest)[1]

    @contextmanager
    def _inside(self, caller: CallerPrompt | None = None) -> Iterator[None]:
        """Mark calls that the model makes to itself in this thread, with pruned arguments; `caller` gave the prompt."""
        if torch.compiler.is_compiling():
            yield
            return
        before = getattr(self._thread, "inside", False), getattr(self._thread, "caller", None)
        self._thread.inside, self._thread.caller = True, caller
        try:
            yield
        finally:
            self._thread.inside, self._thread.caller = before

    def _forward(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward` with pruned images; later steps on the cache of a pruned prompt get a mask that fits."""
        arguments = wrapper.arguments(args, kwargs)
        if not self._has_images(arguments):
            turn = self._turn(arguments)
            if turn is None:
                return wrapper.original(*args, **kwargs)
            turn.continue_forward(arguments, self.adapter.first_position)
            with self._inside(), self._pruned(turn, self._continue(turn)):
                return wrapper.original(**arguments)
        return self.forward(None, wrapper.original, **arguments)

    def forward(self, encoded: list[VisualTokens] | None, original: Any = None, **arguments: Any) -> Any:
        """Call the model's `forward` with encoded images, one for each image of the prompts, in order."""
        prompt, mask = checked_ids(arguments), arguments.get("attention_mask")
        pad_left = mask is not None and not torch.compiler.is_compiling() and bool((mask[:, 0] == 0).any())
        arguments = {**self.adapter.image_arguments(encoded or []), **arguments}
        turn, call = self._first_turn(arguments, prompt, pad_left, encoded)
        if arguments.get("logits_to_keep") is not None:
            arguments["logits_to_keep"] = turns.moved_indices(arguments["logits_to_keep"], turn.compaction)
        with self._inside(), self._pruned(turn, call):
            out = (original or self.model)(**arguments)
        turns.remember(getattr(out, "past_key_values", None), self._done(turn, call))
        return out

    def _generate(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs, *rest = args or (None,)
        arguments = {**kwargs, "input_ids": inputs} if inputs is not None else dict(kwargs)
        if not self._has_images(arguments) and self._turn(arguments) is None:
            return wrapper.original(*args, **kwargs)
        if rest:
            raise ValueError("generate: pass arguments other than input_ids by keyword while a method is attached")
        return self.generate(None, **arguments)

    def _build(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the logits processors or stopping criteria of a `generate` call for the caller's prompt."""
        caller: CallerPrompt | None = getattr(self._thread, "caller", None)
        if caller is None:
            return wrapper.original(*args, **kwargs)
        arguments = wrapper.arguments(args, kwargs)
        config = arguments["generation_config"] = copy(arguments["generation_config"])
        for name in ("max_length", "min_length"):  # they count the caller's prompt, not the compacted one
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name) + caller.dropped)
        if wrapper.name == "_get_stopping_criteria":
            self._thread.caller = None  # whatever else this thread generates meanwhile has a prompt of its own
            return prompts.CallerStoppingCriteria(wrapper.original(**arguments), caller)
        arguments["input_ids_seq_length"] += caller.dropped
        arguments["encoder_input_ids"] = caller.ids
        return prompts.CallerLogitsProcessors(wrapper.original(**arguments), caller)

    @torch.no_grad()
    def generate(self, encoded: list[VisualTokens] | None, **arguments: Any) -> Any:
        """Call the model's `generate` with encoded images, one for each image of the prompts, in order."""
        if arguments.get("assistant_model") is not None:
            raise ValueError("assistant_model: assisted decoding is not supported while a method is attached")
        prompt = checked_ids(arguments)
        if arguments.get("attention_mask") is None:
            config = arguments.get("generation_config") or self.model.generation_config
            arguments["attention_mask"] = prompts.default_mask(prompt, config)
        mask, turn = arguments["attention_mask"], self._turn(arguments)
        if turn is None:
            arguments = {**self.adapter.image_arguments(encoded or []), **arguments}
            counted = (mask.cumsum(-1) - 1).clamp(min=0) if self.positions == "original" else None
            turn, call = self._first_turn(arguments, prompt, True, encoded, counted)
        else:
            config = self.adapter.config
            placeholders = [self.adapter.placeholder(m) for m in get_args(Modality) if hasattr(config, f"{m}_token_id")]
            turn, call = turn.continue_prompt(prompt, mask, placeholders), self._continue(turn)
            for name in (*self.adapter.pixel_arguments, *self.adapter.vision_kwargs):
                arguments.pop(name, None)
            compact_arguments(arguments, turn.compaction, prompts.pad_id(self.model, avoid=placeholders))
            if turn.positions is not None:
                self.adapter.set_position_ids(arguments, turn.compaction, turn.positions)
            elif not turn.compact_positions:
                arguments["position_ids"] = turn.compaction.positions((mask.cumsum(-1) - 1).clamp(min=0))
        caller = CallerPrompt(prompt, arguments["input_ids"].shape[1])
        prompts.shorten(arguments, self.model, caller.dropped)
        if arguments.get("streamer") is not None:
            arguments["streamer"] = prompts.Streamer(arguments["streamer"], prompt)
        cache = arguments.get("past_key_values")
        detached = nullcontext() if cache is None else turns.detached(cache)
        with self._inside(caller), self._pruned(turn, call), detached:
            out = self._model_generate(**arguments)
        cache, turn = getattr(out, "past_key_values", cache), self._done(turn, call)
        if cache is not None:
            turns.remember(cache, turn)
        if isinstance(out, Tensor):
            return caller.restore(out)
        out.sequences = caller.restore(out.sequences)
        return out

    def _has_images(self, arguments: dict[str, Any]) -> bool:
        ready = arguments.get("mm_encoder_outputs")
        if ready and not isinstance(ready, PrunedOutputs):
            raise ValueError("mm_encoder_outputs must be None while a method is attached (pass pixel_values)")
        return not ready and any(arguments.get(name) is not None for name in self.adapter.pixel_arguments)

    def _first_turn(
        self,
        arguments: dict[str, Any],
        prompt: Tensor,
        pad_left: bool,
        encoded: list[VisualTokens] | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Turn, InsideCall | None]:
        """Encode and prune the images; compact the prompt and all per-token arguments, in place.

        Position ids are set where the model would not count them right by itself; `counted` [B, S] are those that
        `generate` would count.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and self._inside_method is not None:
            raise ValueError(f"torch.compile: a model can't be compiled while {self.method.name} is attached")
        given, family = arguments.pop("position_ids", None), self.adapter.positions(arguments)
        cache = arguments.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError("past_key_values: images can't be added to a cache that holds a prompt; leave it out")
        timer, sizes = scoring.StageTimer(prompt.device), self.attention == "proportional"

        def read(images: Sequence[Any]) -> list[Tensor] | None:
            if self._reader is None:
                return None
            if compiling:
                raise ValueError(f"torch.compile: {self.method.name} reads the question in a prompt's ids")
            return self._reader.read(self.adapter, prompt, arguments.get("attention_mask"), images)

        if self.chunk is not None and (compiling or encoded is not None):
            raise ValueError("chunk must be None in a compiled model, and for images that are encoded already")
        if encoded is None and self.chunk is None:
            encoded = self.adapter.encode(arguments, timer, self.crops)
        elif encoded is None:
            how: dict[str, Any] = {name: getattr(self, name) for name in ("chunk", "scope", "crops", "deepstack")}
            encoded = encode_chunks(self._encoder_method, self.adapter, arguments, timer, read, **how, sizes=sizes)
        with timer.time("selection"):
            questions, rows = read(encoded), None
            if self.scope == "video":
                if compiling:
                    raise ValueError("torch.compile: scope must not be 'video', which reads a prompt's ids")
                rows = prompts.rows_of_images(prompt, self.adapter.placeholder("image"), encoded)
            kept, last = prune_images(self._encoder_method, encoded, self.scope, self.deepstack, sizes, questions, rows)
        groups: dict[Modality, list[PrunedImage]] = {}
        for image, tokens in zip(encoded, kept, strict=True):
            groups.setdefault(image.modality, []).append(tokens)
        images = [(self.adapter.placeholder(modality), group) for modality, group in groups.items()]
        compaction = compact(prompt, arguments.get("attention_mask"), images, pad_left=pad_left)
        self._latest = last, timer.seconds
        if not compiling:
            self._thread.results = self._latest
        for name in (*self.adapter.pixel_arguments, *self.adapter.vision_kwargs):
            arguments.pop(name, None)
        fed = ((modality, self.adapter.outputs(group, modality)) for modality, group in groups.items())
        arguments["mm_encoder_outputs"] = PrunedOutputs(fed)
        compact_arguments(arguments, compaction, prompts.pad_id(self.model, avoid=[token for token, _ in images]))
        if compiling:  # embeddings: the model's check that ids and features fit does not compile with a selection
            if any(tokens.planes is not None for tokens in kept):
                raise ValueError("torch.compile: a model with several planes of features can't be compiled pruned")
            del arguments["mm_encoder_outputs"]
            ids = arguments.pop("input_ids")
            embeddings = self.inner.get_input_embeddings()(ids)
            for token, group in images:
                features = torch.cat([tokens.features for tokens in group]).to(embeddings)
                embeddings = embeddings.masked_scatter((ids == token)[..., None], features)
            arguments["inputs_embeds"] = embeddings
        positions = None
        if family is not None:
            if given is not None:  # without a row in front that counts the text
                family = (given[-len(family) :] if given.dim() == family.dim() == 3 else given).expand_as(family)
            positions = compaction.positions(family)
        elif self.positions == "original":
            whole = given if given is not None else counted
            if whole is None:
                whole = torch.arange(prompt.shape[1], device=prompt.device) + self.adapter.first_position
            arguments["position_ids"] = compaction.positions(whole.expand(*whole.shape[:-2], *prompt.shape))
        elif given is not None:
            moved = compaction.gather(given.expand(*given.shape[:-2], *prompt.shape), 0)
            arguments["position_ids"] = moved - compaction.dropped
        self.adapter.set_position_ids(arguments, compaction, positions)
        turn = Turn(prompt, compaction, positions, compact_positions=self.positions == "compact")
        method, call = self._inside_method, None
        if method is not None:
            counts = [(token, [len(tokens.features) for tokens in group]) for token, group in images]
            call = inside.start(method, self._decoder, arguments["input_ids"], compaction.mask, counts)
        if call is not None:
            call.sources = list(zip(encoded, kept, last, strict=True))
        return turn, call

    def _continue(self, turn: Turn) -> InsideCall | None:
        """Return what fits a later call to a cache whose layers hold different columns."""
        if not turn.columns:
            return None
        if self._inside_method is None:
            needed = "a method inside the language model, with which its prompt was read"
            raise ValueError(f"past_key_values needs {needed}, got {self.method.name}")
        return InsideCall(self._inside_method, self._decoder, turn.columns)

    @contextmanager
    def _pruned(self, turn: Turn, call: InsideCall | None) -> Iterator[None]:
        """Let keys count for what they stand for, and prune inside the language model."""
        columns = None if call is None else call.key_columns
        with scoring.biased(turn.compaction.log_sizes, columns), inside.pruned_inside(call):
            yield

    def _done(self, turn: Turn, call: InsideCall | None) -> Turn:
        """Note what a call kept inside the language model."""
        if call is None or not call.images:
            return turn
        layers = len(self._decoder.layers)
        last = [
            survivors(encoded, pruned, before, image.left(), call.method.average_tokens(image.total, layers))
            for (encoded, pruned, before), image in zip(call.sources, call.images, strict=True)
        ]
        self._latest = self._thread.results = last, self.seconds
        return replace(turn, columns=tuple(call.columns))

    def _turn(self, arguments: dict[str, Any]) -> Turn | None:
        """Return what the cache of a call holds, on the device of the new tokens; None if its prompt was not pruned."""
        cache = arguments.get("past_key_values")
        turn = None if cache is None else turns.recall(cache)
        if turn is not None and turn.compaction.log_sizes is not None and self.attention == "plain":
            raise ValueError("past_key_values needs attention='proportional', as its prompt was read, got 'plain'")
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        if turn is None or given is None or turn.input_ids.device == given.device:
            return turn
        return turn.map(lambda tensor: tensor.to(given.device))
