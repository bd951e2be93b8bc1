"""Methods that prune inside the language model: FastV, PyramidDrop and DART. Compose puts one behind another method."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
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
class FastV(OneLayerPruner):
    """Keep the visual tokens that the last prompt token attends to most in the layer before `layer`.

    Args:
        keep: Budget for each image, a count (int) or a fraction (float).
        layer: Index of the first layer that reads the shorter prompt.

    Examples:
        >>> from clustrs import FastV
        >>> FastV(keep=64).schedule(n=576, layers=32)
        {2: 64}
    """

    name = "fastv"
    paper = "https://arxiv.org/abs/2403.06764"


@register
@dataclass(frozen=True)
class PyramidDrop(InsidePruner):
    """Keep the visual tokens that the last prompt token attends to most, fewer from layer to layer.

    With S layers to prune at, step i of S leaves N (k / N)^(i/S) of N tokens: by default 1/2, 1/4 and 1/8 of them.

    Args:
        keep: Budget for each image after the last step, a count (int) or a fraction (float).
        layers: Layers to prune at, as shares of the depth, ascending.
        compact: Count positions without gaps after each step, as published; else kept tokens keep their own.

    Examples:
        >>> from clustrs import PyramidDrop
        >>> PyramidDrop().schedule(n=576, layers=32)
        {8: 288, 16: 144, 24: 72}
    """

    name = "pyramiddrop"
    paper = "https://arxiv.org/abs/2410.17247"
    own_layer = True

    keep: int | float = 0.125
    layers: tuple[float, ...] = (0.25, 0.5, 0.75)
    compact: bool = field(default=False, metadata=accepts(validation.choice, (True, False)))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.layers
        shares = list(given) if isinstance(given, list | tuple) and all(map(validation.is_number, given)) else [1]
        accepted = len(shares) > 0 and shares == sorted(set(shares)) and shares[0] > 0 and shares[-1] < 1
        validation.check(accepted, "layers", "ascending shares of the depth between 0 and 1", given)
        object.__setattr__(self, "layers", tuple(map(float, shares)))

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        self._check_layer(1, layers)
        k, steps, found = self.count(n), len(self.layers), {}
        for step, share in enumerate(self.layers, 1):  # of steps that fall on one layer the last one counts
            found[max(1, int(share * layers))] = k if step == steps else max(k, round(n * (k / n) ** (step / steps)))
        return found


@register
@dataclass(frozen=True)
class DART(OneLayerPruner):
    """Keep pivots, and for each pivot the visual tokens that are least like it (Duplication-Aware Reduction of Tokens).

    Pivots are the tokens of the image and of the text after it whose keys have the largest L1 norm in the layer before
    `layer`. Each pivot in turn takes an equal part of the budget.

    Args:
        keep: Budget for each image, a count (int) or a fraction (float).
        layer: Index of the first layer that reads the shorter prompt.
        image_pivots: Pivots in the image; they are kept.
        text_pivots: Pivots in the text after it.

    Examples:
        >>> from clustrs import DART
        >>> DART(keep=0.25).schedule(n=576, layers=28)
        {2: 144}
    """

    name = "dart"
    paper = "https://arxiv.org/abs/2502.11494"
    reads_hidden = True

    image_pivots: int = field(default=4, metadata=accepts(validation.integer, 1))
    text_pivots: int = field(default=4, metadata=accepts(validation.integer, 0))

    def choose(self, state: LayerState, k: int) -> Tensor:
        assert state.hidden is not None
        norms = state.keys.float().abs().sum((0, 2))
        own = stable_topk(norms[state.image][None], min(self.image_pivots, k))[0]
        text = stable_topk(norms[state.text][None], self.text_pivots)[0]
        pivots = torch.cat([state.image[own], state.text[text]])
        hidden = torch.nn.functional.normalize(state.hidden.double(), dim=-1)
        likeness = hidden[pivots] @ hidden[state.image].mT
        taken = torch.zeros_like(state.image, dtype=torch.bool)
        taken[own] = True
        found, share = [own], -(-(k - len(own)) // len(pivots))
        for row in likeness:
            least = stable_topk(-row.masked_fill(taken, torch.inf)[None], share)[0]
            least = least[: int((~taken).sum())]
            taken[least] = True
            found.append(least)
        return torch.cat(found)[:k]


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
