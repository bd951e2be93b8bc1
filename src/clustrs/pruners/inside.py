"""Base classes of methods that prune inside the language model, and Compose, which puts one behind another method."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import stable_topk
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.baselines import NoPruning
from clustrs.pruners.inputs import Selection
from clustrs.pruners.registry import as_method, register


@dataclass(frozen=True)
class LayerState:
    """State of one image with n tokens, in a prompt of W tokens, before the layer at which it is pruned.

    Args:
        attention: Attention [n] of the prompt's last token to each of them, mean over heads.
        keys: Keys [heads, W, d] of all tokens of the prompt, after the rotary embedding.
        hidden: Input [W, D] of the layer, after the final norm of the language model; None unless the method reads it.
        image: Places [n] of the image's tokens in the prompt, ascending.
        text: Places [T] of the text after them.

    Examples:
        >>> import torch
        >>> from clustrs import FastV, LayerState
        >>> image, text = torch.arange(1, 4), torch.arange(4, 6)
        >>> keys = torch.rand(2, 6, 8)
        >>> state = LayerState(torch.tensor([0.1, 0.3, 0.2]), keys, None, image, text)
        >>> FastV(keep=2).choose(state, 2)
        tensor([1, 2])
    """

    attention: Tensor
    keys: Tensor
    hidden: Tensor | None
    image: Tensor
    text: Tensor


@dataclass(frozen=True)
class InsidePruner(Pruner):
    """Base class for methods that drop visual tokens between two layers of the language model.

    A subclass defines `schedule`, the budget by layer, and if it does not keep the most attended tokens `choose`. Text
    is never dropped, and kept tokens keep their positions. The budget is for each image.

    Args:
        keep: Budget for each image, a count (int) or a fraction (float).

    Examples:
        >>> from dataclasses import dataclass
        >>> from clustrs import InsidePruner
        >>> @dataclass(frozen=True)
        ... class LastLayer(InsidePruner):
        ...     name = "last-layer"
        ...
        ...     def schedule(self, n, layers):
        ...         return {layers - 1: self.count(n)}
        >>> LastLayer(keep=64).average_tokens(n=576, layers=32)
        560.0
    """

    where = "language model"

    own_layer: ClassVar[bool] = False
    """True if attention and keys are those of the layer about to run, not of the one before it."""
    reads_hidden: ClassVar[bool] = False
    """True if `choose` reads the hidden states."""

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        """Return how many of an image's n tokens are left from a layer on, by the layer's index, ascending."""
        raise NotImplementedError(f"{type(self).__name__} must define schedule")

    def choose(self, state: LayerState, k: int) -> Tensor:
        """Return the indices [k] to keep of an image's tokens, in any order: unless overridden, the most attended."""
        return stable_topk(state.attention[None], k)[0]

    def parts(self) -> tuple[Pruner, "InsidePruner | None"]:
        return NoPruning(), self

    def select(self, *args: Any, **others: Any) -> Selection:
        """Raise ValueError: there are no layers around a tensor of tokens."""
        raise ValueError(f"{self.name} prunes inside the language model: attach it to a model; it has no select")

    def _check_layer(self, layer: int, layers: int) -> None:
        validation.check(layer < layers, "layer", f"less than {layers}, the model's number of layers", layer)


@dataclass(frozen=True)
class OneLayerPruner(InsidePruner):
    """Base class for methods that drop tokens once, before the layer of index `layer`."""

    layer: int = field(default=2, metadata=accepts(validation.integer, 1))

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        self._check_layer(self.layer, layers)
        return {self.layer: self.count(n)}


@register
@dataclass(frozen=True)
class Compose(Pruner):
    """Prune at the encoder's output, then once more inside the language model.

    On the command line, "clustermeans keep=144 + fastv layer=8" is such a pair.

    Args:
        first: A method at the encoder's output, its name, or what its `to_dict` returned; without a budget of its own
            it keeps a quarter.
        second: A method inside the language model, likewise. It prunes what the first one kept.
        keep: Budget of `second`, if not the one that it has.

    Raises:
        ValueError: One of the methods prunes at the other's place.

    Examples:
        >>> from clustrs import ClusterMeans, Compose, FastV
        >>> Compose(ClusterMeans(keep=144), FastV(keep=32, layer=8)).keep
        32
    """

    name = "compose"
    where = "both"

    keep: int | float = field(default=None, kw_only=True)  # type: ignore[assignment]
    first: Pruner = field(default="clustermeans")  # type: ignore[assignment]
    second: InsidePruner = field(default="fastv")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        first = as_method("first", self.first, {"keep": 0.25})
        budget = {} if self.keep is None else {"keep": self.keep}
        second = as_method("second", self.second, {}, budget)
        for name, method, where in (("first", first, "encoder"), ("second", second, "language model")):
            validation.check(method.where == where, name, f"a method that prunes in the {where}", method.name)
        self.__dict__.update(first=first, second=second, keep=second.keep)
        super().__post_init__()

    def requirements(self) -> tuple[str, ...]:
        return self.first.requirements()

    def parts(self) -> tuple[Pruner, InsidePruner | None]:
        return self.first, self.second

    select = InsidePruner.select
