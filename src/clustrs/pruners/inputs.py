"""Inputs to a pruner and its output, with their checks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("floating-point tensor", "tensor of integers", "tensor of booleans")
FURTHER = ("received", "object_scores", "early_scores", "joint_scores", "joint_keys")
"""Inputs of single methods, recorded in a model only if its method needs them; each [B, N], the last [B, N, H]."""
PER_TOKEN = ("scores", *FURTHER[:-1])
"""Inputs with one number for each token, [B, N]."""
LARGEST = 1e15  # magnitude accepted: the squares of much larger numbers leave float32


@dataclass(frozen=True)
class Layout:
    """Positions of the tokens in an image, as integers, each [N] or [B, N].

    Args:
        tile: The crop or frame that a token belongs to; 0 is the base.
        y: Its line in the grid of that tile.
        x: Its column there.
        frame: The frame of a video that it belongs to, counted in time; None for an image.

    Examples:
        >>> n = torch.arange(16)
        >>> layout = Layout(tile=torch.zeros_like(n), y=n // 4, x=n % 4)
        >>> Grid(keep=4).select(torch.rand(16, 8), layout=layout).indices
        tensor([ 5,  7, 13, 15])
    """

    tile: Tensor
    y: Tensor
    x: Tensor
    frame: Tensor | None = None


def grid_side(n: int) -> int:
    """Return the side of a square of n tokens, or n if they are none."""
    return math.isqrt(n) if math.isqrt(n) ** 2 == n else n


def grid_layout(tokens: Tensor, side: int | None = None) -> Layout:
    """Return the layout of tokens [B, N, D] on one grid `side` wide; by default a square, or a line if N is none."""
    side = side or grid_side(tokens.shape[1])
    cell = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    return Layout(torch.zeros_like(cell), cell // side, cell % side)


def count_frames(layout: Layout | None, tokens: Tensor) -> Tensor:
    """Return the frame [B, N] of each token of [B, N, D], counted from 0 without gaps; an image is one frame."""
    if layout is None or layout.frame is None:
        return torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    ordered, order = layout.frame.sort(-1)
    number = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).long().cumsum(-1)
    return torch.empty_like(number).scatter_(-1, order, number)


@dataclass(frozen=True)
class PrunerInputs:
    """Inputs to a pruner: all that is known of a batch of images. Absent ones are None.

    Args:
        tokens: Visual tokens [B, N, D], after the projector.
        scores: Attention [B, N] of the vision encoder to each of them.
        layout: Their positions, [B, N] each.
        hidden: Hidden states [B, N, H], or [B, 1 + N, H] with a CLS token.
        keys: Keys [B, N, K], or [B, 1 + N, K] with a CLS token.
        projector: Maps hidden states [B, k, H] to tokens [B, k, D].
        cls: True if the encoder has a CLS token: the first of `hidden` and `keys`.
        question: Embeddings [B, T, D] of the question's tokens, by the language model's own table.
        question_mask: False [B, T] where a question is shorter than others of the batch; None if all are alike.
        clip_tokens: Embeddings [B, N, C] of the tokens by a CLIP model, projected; no supported family has them.
        clip_question: Embeddings [B, T, C] of the question by its text tower.
        received: Attention [B, N] that each token receives from all tokens, in the layer of `scores`.
        object_scores: The same in a middle layer, that of objects (HiPrune).
        early_scores: `scores` of an early layer (VScan).
        joint_scores: `scores` with all heads taken as one (PruMerge+).
        joint_keys: Keys [B, N, H] of all heads side by side.

    Examples:
        >>> inputs = PrunerInputs(tokens=torch.rand(1, 4, 8), scores=torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
        >>> FasterVLM(keep=2).select(inputs).indices
        tensor([[1, 3]])
    """

    tokens: Tensor
    scores: Tensor | None = None
    layout: Layout | None = None
    hidden: Tensor | None = None
    keys: Tensor | None = None
    projector: Callable[[Tensor], Tensor] | None = None
    cls: bool = True
    question: Tensor | None = None
    question_mask: Tensor | None = None
    clip_tokens: Tensor | None = None
    clip_question: Tensor | None = None
    received: Tensor | None = None
    object_scores: Tensor | None = None
    early_scores: Tensor | None = None
    joint_scores: Tensor | None = None
    joint_keys: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return an input that the method needs, so that it is there."""
        value: Tensor | None = getattr(self, name)
        assert value is not None, name
        return value

    @property
    def patch_hidden(self) -> Tensor | None:
        """Hidden states [B, N, H] without the CLS token."""
        return None if self.hidden is None else self.hidden[:, int(self.cls) :]

    @property
    def patch_keys(self) -> Tensor | None:
        """Keys [B, N, K] without the CLS token."""
        return None if self.keys is None else self.keys[:, int(self.cls) :]


@dataclass(frozen=True)
class Selection:
    """Output of a pruner. For one image without a batch dimension there is none here: [k, D] instead of [B, k, D].

    Args:
        tokens: Kept tokens [B, k, D], as the language model gets them.
        indices: The input token [B, k] that each stands for, ascending (VisionZip: in its order; -1 is the CLS token).
        labels: The output token [B, N] that each input token belongs to, for methods that group tokens (-1: none).
        centroids: Cluster centers [B, k, D].
        alpha: Shrink factors [B, k]; 1 means unchanged.
        merged: True [B, k] for output tokens that are a mixture of input tokens.
        shares: Contribution [B, N] of each input token to the center of its cluster; a cluster's sum to 1.
        sizes: Input tokens [B, k] that each stands for, on demand: its cluster, or itself and the dropped ones nearest.

    Examples:
        >>> selection = ClustRS(keep=4).select(torch.rand(2, 9, 8), torch.rand(2, 9))
        >>> selection.tokens.shape, selection.labels.shape, selection.image(0).tokens.shape
        (torch.Size([2, 4, 8]), torch.Size([2, 9]), torch.Size([4, 8]))
    """

    tokens: Tensor
    indices: Tensor
    labels: Tensor | None = None
    centroids: Tensor | None = None
    alpha: Tensor | None = None
    merged: Tensor | None = None
    shares: Tensor | None = None
    sizes: Tensor | None = None

    def map(self, function: Callable[..., Tensor], *others: "Selection") -> "Selection":
        """Return a selection with `function` applied to every tensor, together with the same ones of `others`."""
        names = [name for name, value in vars(self).items() if value is not None]
        return Selection(**{name: function(*(getattr(one, name) for one in (self, *others))) for name in names})

    def image(self, index: int) -> "Selection":
        """Return one image of a batch, without the batch dimension."""
        return Selection(*[None if part is None else part[index] for part in vars(self).values()])  # type: ignore[arg-type]


def check_shapes(inputs: PrunerInputs) -> PrunerInputs:
    """Check the shapes of all inputs, and add a batch dimension if there is none."""
    tokens = inputs.tokens
    shape = _check_tensor("tokens", tokens)
    if len(shape) not in (2, 3):
        raise ValueError(f"tokens must have shape [N, D], or [B, N, D] for a batch, got {[*shape]}")
    if 0 in shape:
        raise ValueError(f"tokens must have at least one image of at least one token, got shape {[*shape]}")
    ready: dict[str, Any] = {}
    for name, value in vars(inputs).items():
        if value is None or name in ("projector", "cls"):
            ready[name] = value
        elif name == "layout":
            ready[name] = _ready_layout(value, tokens)
        else:
            if name in PER_TOKEN:
                _check_tensor(name, value, tokens, shape[:-1])
            elif name != "tokens":
                _check_tensor(name, value, tokens, _shape(name, inputs), KINDS[2 if name == "question_mask" else 0])
            image = value.unsqueeze(0) if len(shape) == 2 else value
            # Kernels add in another order along other strides: one memory layout gives one result.
            ready[name] = image.contiguous() if name in ("tokens", "scores") else image
    return PrunerInputs(**ready)


def _shape(name: str, inputs: PrunerInputs) -> tuple[int, ...]:
    """Return the shape that an input must have which is not `PER_TOKEN`, -1 for any size."""
    *batch, n, width = inputs.tokens.shape
    match name:
        case "hidden" | "keys":
            return (*batch, n + inputs.cls, -1)
        case "question":
            return (*batch, -1, width)
        case "question_mask":
            return (*batch, -1) if inputs.question is None else inputs.question.shape[:-1]
        case "clip_question":
            return (*batch, -1, -1 if inputs.clip_tokens is None else inputs.clip_tokens.shape[-1])
    return (*batch, n, -1)  # clip_tokens, joint_keys


def _ready_layout(layout: Layout, tokens: Tensor) -> Layout:
    """Return a layout with a value for each image: one [N] serves every image of a batch."""
    *batch, n, _ = tokens.shape
    given = {name: part for name, part in vars(layout).items() if name != "frame" or part is not None}
    for name, value in given.items():
        shape = (n,) if getattr(value, "ndim", 1) == 1 else (*batch, n)
        _check_tensor(f"layout.{name}", value, tokens, shape, KINDS[1])
    return Layout(**{name: part.long().expand(*(batch or (1,)), n) for name, part in given.items()})


def _check_tensor(
    name: str,
    value: Any,
    tokens: Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    kind: str = KINDS[0],
) -> torch.Size:
    """Check for a tensor of a kind, on the device of the tokens, of the given shape (-1: any size); return its own."""
    found = None
    if isinstance(value, Tensor):
        found = KINDS[0 if value.is_floating_point() else 2 if value.dtype == torch.bool else 1]
    if found != kind:
        raise ValueError(f"{name} must be a {kind}, got {getattr(value, 'dtype', type(value).__name__)}")
    own: torch.Size = value.shape
    if tokens is None or shape is None:
        return own
    if value.device != tokens.device:
        raise ValueError(f"{name} must be on {tokens.device}, the device of the tokens, got {value.device}")
    if own != shape and (  # the usual case first: every selection pays for this
        len(shape) != len(own) or any(e not in (-1, s) for e, s in zip(shape, own, strict=True))
    ):
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}] for tokens of shape {[*tokens.shape]}, got {[*own]}")
    return own


def check_inputs(method: str, needs: tuple[str, ...], inputs: PrunerInputs, values: bool) -> None:
    """Check that all inputs are there that a method needs; with `values`, also those of the scores and states."""
    for need in needs:
        if getattr(inputs, need) is None:
            form = "Layout(...)" if need == "layout" else "..."
            raise ValueError(f"{need} is missing: {method} needs it (write select(tokens, {need}={form}))")
        if need.endswith("question") and (value := getattr(inputs, need)).shape[-2] == 0:
            raise ValueError(f"{need} must have at least one token, got shape {[*value.shape]}")
    if values:
        for name in ("scores", *FURTHER[:-1]):
            if (value := getattr(inputs, name)) is not None and (name == "scores" or name in needs):
                check_values(name, value, 0, LARGEST)
        for name in ("hidden", "keys", "joint_keys", "question", "clip_tokens", "clip_question"):
            if name in needs:
                check_finite(name, getattr(inputs, name))
        if inputs.question_mask is not None and not inputs.question_mask.any(-1).all():
            raise ValueError("question_mask must have a True for each image, got a row without one")


def check_values(name: str, value: Tensor, low: float, high: float) -> None:
    """Check that all values are finite and in [low, high]. Reads the tensor, so an accelerator has to be waited for."""
    least, most = (bound.item() for bound in torch.aminmax(value.detach()))
    if not (low <= least and most <= high):  # also where either is NaN
        found = "NaN" if math.isnan(least) or math.isnan(most) else f"values from {least:g} to {most:g}"
        raise ValueError(f"{name} must be finite, from {low:g} to {high:g}, got {found}")


def check_finite(name: str, value: Tensor, norms: Tensor | None = None) -> None:
    """Check that all values are finite, and none so large that squares overflow, by their norm or by known norms."""
    if norms is None:
        norms = torch.linalg.vector_norm(value.detach(), dtype=torch.promote_types(value.dtype, torch.float32))
    if not norms.amax().item() <= LARGEST:
        check_values(name, value, -LARGEST, LARGEST)


def check_indices(method: str, value: Tensor, n: int, k: int) -> None:
    """Check for exactly k distinct indices of n tokens for each image; -1 stands for the CLS token."""
    if value.shape[-1] != k:
        raise ValueError(f"{method} must return {k} indices for each image, got {value.shape[-1]}")
    ordered = value.sort(-1).values
    least, most = ordered.amin().item(), ordered.amax().item()
    if least < -1 or most >= n:
        raise ValueError(f"{method} must return indices from 0 to {n - 1}, got indices from {least} to {most}")
    repeats = int((ordered[:, 1:] == ordered[:, :-1]).sum().item())
    if repeats:
        raise ValueError(f"{method} must return {k} distinct indices, got {repeats} duplicates of {value.numel()}")
