"""No pruning: what every method is compared with."""

from dataclasses import dataclass

from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class NoPruning(Pruner):
    """Keep every token."""

    name = "none"
    label = "no pruning"

    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.keep != 1.0 or not isinstance(self.keep, float):
            raise ValueError(f"keep={self.keep!r}: this method keeps every token, leave keep out (or give 1.0)")
