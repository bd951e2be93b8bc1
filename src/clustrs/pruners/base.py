"""Base class of all methods: budget, checks, attaching, and what a method declares about itself."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import assign_to_kept, gather_tokens, upcast_half
from clustrs.pruners import inputs as checks
from clustrs.pruners.inputs import PrunerInputs, Selection
from clustrs.validation import Attention, Crops, Deepstack, Positions, Scope

if TYPE_CHECKING:
    from clustrs.models.attach import Handle
    from clustrs.pruners.inside import InsidePruner

SERVED = ("scores", "layout")
"""Inputs besides the tokens that are there in vLLM, also when a tower's heads are split over ranks."""


def accepts(check: Callable[..., Any], *limits: Any) -> dict[str, Any]:
    """Return the `metadata` of a parameter that a function of `clustrs.validation` checks, with these limits. A default
    of None is accepted, too; a value that the function returns replaces the one given."""
    return {"check": (check, *limits)}


@dataclass(frozen=True)
class Pruner:
    """Base class for visual-token pruning methods.

    A method is a frozen dataclass with a `name` and either `_choose`, which returns the indices to keep, or `_select`,
    which returns a whole `Selection`. `register` makes it known by its name. Bad parameters are ValueErrors.

    Args:
        keep: Budget: a count of tokens (int of at least 1), or a fraction of them (float in (0, 1]).

    Examples:
        >>> @dataclass(frozen=True)
        ... class Loudest(Pruner):
        ...     name = "loudest"
        ...
        ...     def _choose(self, inputs, k):
        ...         return inputs.tokens.norm(dim=-1).topk(k).indices
        >>> Loudest(keep=2).select(torch.diag(torch.arange(4.0))).indices
        tensor([2, 3])
    """

    name: ClassVar[str]
    """Name in the registry, on the command line and in stored runs."""
    label: ClassVar[str]
    """Name in reports and figures; that of the class unless set."""
    paper: ClassVar[str] = ""
    """Link to the paper."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `PrunerInputs` that must be given besides the tokens."""
    clusters: ClassVar[bool] = False
    """True if selections have labels, centroids and alpha."""
    merges: ClassVar[bool] = False
    """True if output tokens may be mixtures of input tokens."""
    exportable: ClassVar[bool] = False
    """True if the selection can be exported (ONNX, ExecuTorch): no control flow depends on values."""
    servable: ClassVar[bool]
    """True if vLLM can serve it: it needs nothing but `SERVED`. Follows from `needs` unless set."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Parameters that have a name of their own: "no-rrs" of the method "clustrs" is known as "clustrs-no-rrs"."""

    where: ClassVar[Literal["encoder", "language model", "both"]] = "encoder"
    """Place of pruning: at the encoder's output, or inside the language model."""

    keep: int | float

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.label = cls.__dict__.get("label", cls.__name__)
        cls.servable = cls.__dict__.get("servable", cls.where == "encoder" and set(cls.needs) <= set(SERVED))

    def __post_init__(self) -> None:
        validation.keep(self.keep)
        for field in fields(self):
            check, *limits = field.metadata.get("check", (None,))
            value = getattr(self, field.name)
            if check is not None and not (value is None and field.default is None):
                checked = check(field.name, value, *limits)
                self.__dict__[field.name] = value if checked is None else checked

    def count(self, n: int) -> int:
        """Return how many of n tokens survive."""
        return min(n, self.keep if isinstance(self.keep, int) else max(1, round(self.keep * n)))

    def requirements(self) -> tuple[str, ...]:
        """Return what this method `needs`; a method that wraps another adds what that one needs."""
        return self.needs

    def parts(self) -> "tuple[Pruner, InsidePruner | None]":
        """Return the method that prunes at the encoder's output, and the one inside the language model."""
        return self, None

    def average_tokens(self, n: int, layers: int) -> float:
        """Return the visual tokens of an image of n, as a mean over the layers of a language model.

        Examples:
            >>> from clustrs import FastV
            >>> FastV(keep=64, layer=2).average_tokens(n=576, layers=32)
            96.0
        """
        first, inside = self.parts()
        left, total = first.count(n), 0
        schedule = {} if inside is None else inside.schedule(left, layers)
        for layer in range(layers):
            left = schedule.get(layer, left)
            total += left
        return total / layers

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name and all parameters, ready for JSON; the inverse of `from_dict`."""
        values = {"name": self.name, **{field.name: getattr(self, field.name) for field in fields(self)}}
        return {key: value.to_dict() if isinstance(value, Pruner) else value for key, value in values.items()}

    def select(
        self,
        tokens: Tensor | PrunerInputs,
        scores: Tensor | None = None,
        *,
        sizes: bool = False,
        check: bool | None = None,
        **others: Any,
    ) -> Selection:
        """Select the tokens of one image, or of each image in a batch.

        Args:
            tokens: Visual tokens [N, D] or [B, N, D]; or a `PrunerInputs` with all inputs.
            scores: Attention [N] or [B, N] of the vision encoder to each token.
            sizes: Count how many input tokens each kept one stands for, as `Selection.sizes`.
            check: Look for NaN, infinite and negative values, and for wrong indices; by default on the CPU only.
            **others: Further fields of `PrunerInputs`, without a batch dimension where the tokens have none.

        Raises:
            ValueError: An input that the method needs is missing, or one has a wrong shape or bad values.

        Examples:
            >>> selection = ClustRS(keep=16).select(torch.rand(576, 64), scores=torch.rand(576))
            >>> selection.tokens.shape
            torch.Size([16, 64])
        """
        if isinstance(tokens, PrunerInputs) and (scores is not None or others):
            raise ValueError("select takes a PrunerInputs alone, or tokens and keywords, got both")
        given = tokens if isinstance(tokens, PrunerInputs) else PrunerInputs(tokens, scores, **others)
        inputs = checks.check_shapes(given)
        (_, n, _), device = inputs.tokens.shape, inputs.tokens.device.type
        if check is None:
            check = device == "cpu" and not torch.compiler.is_compiling()
        checks.check_inputs(self.name, self.requirements(), inputs, values=check)
        k = self.count(n)
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            selection = self._select(inputs, k, check) if k < n else self._select_all(inputs.tokens, check)
        if sizes:
            selection = replace(selection, sizes=count_sizes(selection, inputs.tokens))
        if check:
            checks.check_indices(self.name, selection.indices, n, k)
            if selection.tokens.shape[:2] != selection.indices.shape:
                expected = f"[{len(inputs.tokens)}, {k}, any]"
                raise ValueError(f"{self.name} must return tokens of shape {expected}, got {[*selection.tokens.shape]}")
        return selection if given.tokens.dim() == 3 else selection.image(0)

    def compile(self, **options: Any) -> Self:
        """Return a copy whose `select` is compiled by `torch.compile` with these options; values are not checked.

        On CUDA it uses CUDA graphs and copies what they return. Every size of image, batch and budget compiles anew;
        beyond torch's `recompile_limit` that is an error, or with `fullgraph=False` selecting continues uncompiled.
        """
        graphs = torch.cuda.is_available() and not {"mode", "options", "backend"} & options.keys()
        defaults = {"fullgraph": True, "dynamic": False} | ({"mode": "reduce-overhead"} if graphs else {})
        compiled = torch.compile(self.select, **{**defaults, **options})

        def select(*args: Any, **keywords: Any) -> Selection:
            selection: Selection = compiled(*args, **keywords)
            return selection.map(torch.clone) if graphs else selection

        twin = copy(self)
        object.__setattr__(twin, "select", select)
        return twin

    def attach(
        self,
        model: Any,
        *,
        scope: Scope = "image",
        crops: Crops = "all",
        positions: Positions = "auto",
        attention: Attention = "auto",
        deepstack: Deepstack = "raw",
        chunk: int | None = None,
        processor: Any = None,
        question: Any = None,
    ) -> "Handle":
        """Prune in a transformers model from now on.

        Args:
            model: A vision-language model of a supported family.
            scope: One budget for each "image" or video, each "crop" of an image, each "frame" of a video, or each
                "video", also one whose frames come as images: all images of a prompt.
            crops: "all" crops of an image, or the "base" crop alone.
            positions: "compact" (without gaps), "original" (each keeps its own), or "auto": `Adapter.auto_positions`.
            attention: "plain", "proportional" (a survivor of n tokens counts as n keys), or "auto": if possible.
            deepstack: Features that a family feeds into later layers: "raw", or "shrunk" as the tokens are.
            chunk: Frames of a video that are encoded at a time, for long videos: the method keeps its budget of each
                chunk, then of what the chunks have left. None: all at once.
            processor: The model's processor, for methods that read the question: by its chat template they find it in
                a prompt. By default it is loaded from where the model was, without downloads.
            question: For these methods, what they read in place of the text of an image's turn: a text or token ids
                [T] for all images of a call, or a list with one for each.

        Returns:
            A handle; its `remove()`, or leaving a `with` block, restores the model. It says what "auto" chose.

        Raises:
            ValueError: The model's family is not supported, or an option is unknown.
        """
        from clustrs.models.attach import Handle

        options: dict[str, Any] = {"scope": scope, "crops": crops, "positions": positions, "attention": attention}
        options |= {"deepstack": deepstack, "chunk": chunk, "processor": processor, "question": question}
        return Handle(self, model, **options)

    def __call__(self, model: Any, **options: Any) -> "Handle":
        """Attach to a model for a `with` block; see `attach`."""
        return self.attach(model, **options)

    def _select_all(self, tokens: Tensor, check: bool) -> Selection:
        if check:
            checks.check_finite("tokens", tokens)
        indices = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
        if not self.clusters:
            return Selection(tokens, indices)
        alpha = torch.ones(tokens.shape[:2], dtype=upcast_half(tokens[:, :1]).dtype, device=tokens.device)
        return Selection(tokens, indices, indices, centroids=tokens, alpha=alpha, shares=torch.ones_like(alpha))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        """Select k < N tokens of [B, N, D]; `check` their values: only those of what the method `needs` are checked."""
        if check:
            checks.check_finite("tokens", inputs.tokens)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            indices = self._choose(inputs, k).sort(-1).values
        if check:
            checks.check_indices(self.name, indices, inputs.tokens.shape[1], k)
        return Selection(gather_tokens(inputs.tokens, indices), indices)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        """Return the indices [B, k] to keep, in any order."""
        raise NotImplementedError(f"{type(self).__name__} must define _choose or _select")


@torch.no_grad()
def count_sizes(selection: Selection, tokens: Tensor, before: Tensor | None = None) -> Tensor:
    """Count the tokens of [B, N, D] that each kept one stands for, [B, k], as `Selection.sizes` says; `before` [B, N]
    is what each of them stood for."""
    labels, k = selection.labels, selection.indices.shape[-1]
    if labels is None:
        labels = assign_to_kept(upcast_half(tokens), selection.indices)
    each = torch.ones_like(labels) if before is None else before
    if k == tokens.shape[1]:
        return each
    counted = torch.zeros_like(selection.indices)
    return counted.scatter_add_(-1, labels.clamp(min=0), each * (labels >= 0)).clamp_(min=1)
