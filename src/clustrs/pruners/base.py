"""What every method has in common: its budget, its checks, its place in the registry."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.picking import rows_at
from clustrs.pruners import checks
from clustrs.pruners.selection import EncoderStates, Layout, Selection

if TYPE_CHECKING:
    from clustrs.models.attach import Handle

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Pruner:
    """A way to keep some of a image's visual tokens. `keep` is a count (int) or a fraction of them (float)."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """What `select` must be given besides the tokens: "attention", or fields of `EncoderStates`."""

    keep: int | float

    def __post_init__(self) -> None:
        validation.keep(self.keep)

    def count(self, n: int) -> int:
        """How many of n tokens survive."""
        return min(n, self.keep if isinstance(self.keep, int) else max(1, round(self.keep * n)))

    def to_dict(self) -> dict[str, Any]:
        """All parameters and the method's name, ready for JSON; `clustrs.from_dict` is the way back."""
        return {"method": self.name, **asdict(self)}

    def select(
        self,
        tokens: Tensor,
        attention: Tensor | None = None,
        states: EncoderStates | None = None,
        *,
        layout: "Layout | None" = None,
        check: bool | None = None,
    ) -> Selection:
        """Keep the tokens that the method chooses, of one image [N, D] or of each in a batch [B, N, D].

        `attention` [N] or [B, N] is how much the vision encoder attends to each token; `states` is what else it
        knows. `check` looks for NaN, infinite and negative values; by default on the CPU only, because elsewhere
        one has to wait for the device to look.
        """
        checks.tokens(tokens)
        states = states or EncoderStates()
        *batch, n, _ = tokens.shape
        for need in self.needs:
            if (attention if need == "attention" else getattr(states, need)) is None:
                where = "attention" if need == "attention" else f"states=EncoderStates({need}=...)"
                raise ValueError(f"{need} is missing: {self.name} needs it, give select(..., {where})")
        if check is None:
            check = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
        if attention is not None:
            checks.beside("attention", attention, (*batch, n), tokens)
            if check:
                checks.values("attention", attention, 0, checks.LARGEST)
        for name, state in (("hidden", states.hidden), ("keys", states.keys)):
            if state is not None:
                checks.beside(f"states.{name}", state, (*batch, n + states.cls, -1), tokens)
                if check and name in self.needs:
                    checks.finite(f"states.{name}", state)

        if not batch:
            tokens, attention, states = (
                tokens[None],
                attention[None] if attention is not None else None,
                states.batched(),
            )
        k = self.count(n)
        with torch.autocast(tokens.device.type, enabled=False):
            chosen = self._all(tokens, check) if k == n else self._select(tokens, attention, states, k, check)
        return chosen if batch else chosen.image(0)

    def attach(self, model: Any, *, scope: str = "image", crops: str = "all", positions: str = "compact") -> "Handle":
        """Prune in a transformers model from now on, until `remove()` is called on what this returns.

        scope: one budget for a whole "image", or one for each "crop". crops: "all", or the "base" one alone.
        positions: "compact" (they run on without gaps), or "original" (each survivor keeps the one it had).
        """
        from clustrs.models.attach import Handle

        return Handle(self, model, scope=scope, crops=crops, positions=positions)

    def __call__(self, model: Any, **options: Any) -> "Handle":
        """`attach` for a `with` block."""
        return self.attach(model, **options)

    def _all(self, tokens: Tensor, check: bool) -> Selection:
        """The selection when nothing has to go."""
        if check:
            checks.finite("tokens", tokens)
        return Selection(tokens, torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1))

    def _select(
        self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int, check: bool
    ) -> Selection:
        """Choose k < N of the tokens [B, N, D].

        What the method `needs` is there, and all is checked but the values of the tokens: it may be cheaper to do
        that on the way.
        """
        if check:
            checks.finite("tokens", tokens)
        with torch.no_grad():
            indices = self._choose(tokens, attention, states, k).sort(-1).values
        return Selection(rows_at(tokens, indices), indices)

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        """The indices [B, k], in any order: all that a method which only drops tokens has to say."""
        raise NotImplementedError(f"{type(self).__name__} must define _choose or _select")


def single(tensor: Tensor) -> Tensor:
    """Half precision as float32, other types as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor
