"""What every method has in common: its budget, its checks, its name in the registry."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.indexing import gather_tokens
from clustrs.ops.precision import upcast_half
from clustrs.options import Crops, Deepstack, Positions, Scope
from clustrs.pruners import checks
from clustrs.pruners.selection import EncoderStates, Layout, PrunerInputs, Selection

if TYPE_CHECKING:
    from clustrs.models.attach import Handle


@dataclass(frozen=True)
class Pruner:
    """A way to keep some of an image's visual tokens. `keep` is a count (int) or a fraction of them (float)."""

    name: ClassVar[str]
    label: ClassVar[str]
    """How reports and figures spell the method; the name of the class unless it says otherwise."""
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """What `select` must be given besides the tokens: "attention", or fields of `EncoderStates`."""
    clusters: ClassVar[bool] = False
    """Whether selections have labels, centroids and alpha."""
    merges: ClassVar[bool] = False
    """Whether output tokens may be mixtures of input tokens."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Parameters that have a name of their own: "robust" of the method "clustrs" is known as "clustrs-robust"."""

    keep: int | float

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "label" not in cls.__dict__:
            cls.label = cls.__name__

    def __post_init__(self) -> None:
        validation.keep(self.keep)

    def count(self, n: int) -> int:
        """How many of n tokens survive."""
        return min(n, self.keep if isinstance(self.keep, int) else max(1, round(self.keep * n)))

    def requirements(self) -> tuple[str, ...]:
        """What this method `needs`; a method that wraps another adds what that one needs."""
        return self.needs

    def to_dict(self) -> dict[str, Any]:
        """The method's name and all parameters, ready for JSON; `clustrs.from_dict` is the way back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "name": self.name,
            **{key: value.to_dict() if isinstance(value, Pruner) else value for key, value in values.items()},
        }

    def select(
        self,
        tokens: Tensor,
        attention: Tensor | None = None,
        states: EncoderStates | None = None,
        *,
        layout: Layout | None = None,
        question: Tensor | None = None,
        check: bool | None = None,
    ) -> Selection:
        """Keep the tokens that the method chooses, of one image [N, D] or of each in a batch [B, N, D].

        `attention` [N] or [B, N] is how much the vision encoder attends to each token; `states` is what else it
        knows. `layout` says where the tokens lie; `question` [T, D] or [B, T, D] is what is asked, as embeddings.
        `check` looks for NaN, infinite and negative values, and for indices that no method should return; by default
        on the CPU only, because elsewhere one has to wait for the device to look.
        """
        checks.tokens(tokens)
        if check is None:
            check = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        inputs = checks.collect(tokens, attention, states or EncoderStates(), layout, question)
        checks.requirements(self.name, self.requirements(), inputs)
        if check:
            checks.input_values(inputs, self.requirements())
        k = self.count(inputs.tokens.shape[1])
        with torch.autocast(tokens.device.type, enabled=False):
            if k == inputs.tokens.shape[1]:
                selection = self._select_all(inputs.tokens, check)
            else:
                selection = self._select(inputs, k, check)
        if check:
            checks.selection(self.name, selection, inputs.tokens.shape[1], k)
        return selection if tokens.dim() == 3 else selection.image(0)

    def compile(self, **options: Any) -> Self:
        """The same method with `select` compiled by `torch.compile`, for images of one size (static shapes).

        Attached to a model it selects compiled as well. On CUDA it uses CUDA graphs (mode "reduce-overhead") and copies
        what they return. `options` go to `torch.compile`. Values are not checked. Every further size of image, batch
        and budget compiles anew. Beyond torch's `recompile_limit` (8, for all compiled methods together) that is an
        error; with `fullgraph=False`, selecting continues uncompiled. What `dataclasses.replace` makes is not compiled.
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
        positions: Positions = "compact",
        deepstack: Deepstack = "raw",
    ) -> "Handle":
        """Prune in a transformers model from now on, until `remove()` is called on what this returns.

        scope: one budget for a whole "image", or one for each "crop". crops: "all", or the "base" one alone.
        positions: "compact" (they run on without gaps), or "original" (each survivor keeps the one it had). deepstack:
        features that a family feeds into later layers stay "raw", or are "shrunk" as the tokens are.
        """
        from clustrs.models.attach import Handle

        return Handle(self, model, scope=scope, crops=crops, positions=positions, deepstack=deepstack)

    def __call__(self, model: Any, **options: Any) -> "Handle":
        """`attach` for a `with` block."""
        return self.attach(model, **options)

    def _select_all(self, tokens: Tensor, check: bool) -> Selection:
        """The selection when nothing has to go."""
        if check:
            checks.finite("tokens", tokens)
        indices = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
        if not self.clusters:
            return Selection(tokens, indices)
        alpha = torch.ones(tokens.shape[:2], dtype=upcast_half(tokens[:, :1]).dtype, device=tokens.device)
        return Selection(tokens, indices, indices, centroids=tokens, alpha=alpha, shares=torch.ones_like(alpha))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        """Choose k < N of the tokens [B, N, D].

        What the method `needs` is there, and all is checked but the values of the tokens: it may be cheaper to do
        that on the way.
        """
        if check:
            checks.finite("tokens", inputs.tokens)
        with torch.no_grad():
            indices = self._choose(inputs, k).sort(-1).values
        if check:
            checks.indices(self.name, indices, inputs.tokens.shape[1], k)
        return Selection(gather_tokens(inputs.tokens, indices), indices)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        """The indices [B, k], in any order: all that a method which only drops tokens has to say."""
        raise NotImplementedError(f"{type(self).__name__} must define _choose or _select")
