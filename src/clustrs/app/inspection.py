"""Why a method kept what it kept: clusters, scores, places in feature space, and attention before and after pruning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from clustrs.app.trial import LoadedModel
from clustrs.models.adapters.base import VisualTokens
from clustrs.models.ask import Batch, as_seen, questions
from clustrs.models.select import select_tokens
from clustrs.pruners import NoPruning, Pruner, Selection

if TYPE_CHECKING:
    from torch import Tensor

Values = NDArray[np.float64]
LONGEST_PROMPT = 5000  # tokens of a prompt whose attention is read: the weights of a layer are its square


def to_numpy(tensor: "Tensor") -> Values:
    """Return a tensor of any type and device as a numpy array in double precision."""
    values: Values = tensor.detach().double().cpu().numpy()
    return values


@dataclass(frozen=True)
class Plane:
    """Plane of the two directions [2, D] in which tokens vary most, and each direction's share of the variance."""

    center: Values
    axes: Values
    shares: tuple[float, float]

    def project(self, tokens: Values) -> Values:
        projected: Values = (tokens - self.center) @ self.axes.T
        return projected


def principal_plane(tokens: Values) -> Plane:
    """Compute the PCA of tokens [N, D]; the largest number of a direction is positive, so nothing is mirrored."""
    center, axes, shares = tokens.mean(0), np.zeros((2, tokens.shape[1])), [0.0, 0.0]
    _, lengths, rows = np.linalg.svd(tokens - center, full_matrices=False)
    total = float((lengths**2).sum())
    for i, row in enumerate(rows[:2]):
        axes[i] = row * np.sign(row[np.abs(row).argmax()])
        shares[i] = float(lengths[i] ** 2) / total if total > 0 else 0.0
    return Plane(center, axes, (shares[0], shares[1]))


@dataclass(frozen=True)
class View:
    """All tokens of one image, for a page to draw: what the base crop shows, and its height and width in tokens.

    `columns` has lists with an entry per token, None where there is nothing: `size` is how many tokens a kept one
    stands for, `alpha` how much of it is left after shrinkage, `distance` that to its cluster's centroid before it,
    `px` and `py` its place on the plane. `before` and `after` are shares of the language model's attention with all
    tokens and with the kept ones, where a kept token's share is divided among those it stands for.
    """

    title: str
    image: Image.Image
    grid: tuple[int, int]
    columns: dict[str, list[Any]]
    note: str = ""


@dataclass(frozen=True)
class Inspection:
    """The clean image and, if there is one, the corrupted one, on the clean tokens' plane with its two `shares`."""

    method: str
    clusters: bool
    views: tuple[View, ...]
    shares: tuple[float, float]


def inspect(
    loaded: LoadedModel, method: Pruner, images: Sequence[tuple[str, Image.Image]], question: str = ""
) -> Inspection:
    """Select tokens of each image (its title, its pixels) by a method, for a question (by default the model's own); the
    first image is the clean one."""
    question = question.strip() or loaded.question
    with loaded.lock:
        batches = [loaded.encode([image], question, [method]) for _, image in images]
        asked = [questions(loaded.model, loaded.processor, batch, method) for batch in batches]
        attended = [attention(loaded, batch, method) for batch in batches]
    encoded = [batch.images[0] for batch in batches]
    plane = principal_plane(to_numpy(encoded[0].tokens))
    views, clustered = [], False
    for (title, image), tokens, read, shares in zip(images, encoded, asked, attended, strict=True):
        ((selection, _),) = select_tokens(method, [tokens], "image", questions=read)
        clustered = clustered or selection.labels is not None
        seen, columns = as_seen(loaded.processor, image), _columns(tokens, selection, plane)
        columns |= _attended(columns, selection, *shares) if shares else {}
        note = _note(tokens, selection, "" if read is None else question)
        views.append(View(title, seen, tokens.grids[0], columns, note))
    return Inspection(method.name, clustered, tuple(views), plane.shares)


def _columns(encoded: VisualTokens, selection: Selection, plane: Plane) -> dict[str, list[Any]]:
    features, indices = to_numpy(encoded.tokens), selection.indices.tolist()
    everything, kept = range(len(features)), set(indices)
    alphas = {} if selection.alpha is None else dict(zip(indices, selection.alpha.float().tolist(), strict=True))
    labels = [-1] * len(features) if selection.labels is None else selection.labels.tolist()
    distances: list[float | None] = [None] * len(features)
    if selection.centroids is not None:
        centroids = to_numpy(selection.centroids)
        lengths = np.linalg.norm(features - centroids[np.maximum(labels, 0)], axis=1).tolist()
        distances = [None if label < 0 else length for label, length in zip(labels, lengths, strict=True)]
    px, py = plane.project(features).T.tolist()
    sizes = [labels.count(label) if label >= 0 else 1 for label in labels]
    return {
        **{name: getattr(encoded.layout, name).tolist() for name in ("tile", "y", "x")},
        "score": encoded.scores.float().tolist(),
        "kept": [i in kept for i in everything],
        "cluster": [None if label < 0 else label for label in labels],
        "size": [sizes[i] if i in kept else None for i in everything],
        "alpha": [alphas.get(i) for i in everything],
        "distance": distances,
        "px": px,
        "py": py,
    }


def attention(loaded: LoadedModel, batch: Batch, method: Pruner) -> tuple[Values, Values] | None:
    """Return how much the prompt's last token attends to each candidate [N] of its image unpruned, and to each kept
    token [k] after pruning, as means over layers and heads; None where a family or method has other places for them."""
    decoder, image, rows = loaded.model.get_decoder(), batch.images[0], list[Any]()
    layers = [layer for name, layer in decoder.named_modules() if name.endswith("self_attn")]
    placeholder = getattr(loaded.model.config, "image_token_id", None)
    starts = [i for i, token in enumerate(batch.input_ids[0].tolist()) if token == placeholder]
    if not layers or not starts or len(batch.input_ids[0]) > LONGEST_PROMPT or method.where != "encoder":
        return None
    first, usual, found = starts[0], decoder.config._attn_implementation, []

    def record(_layer: Any, _arguments: Any, output: Any) -> None:
        rows.append(output[1][0, :, -1].double().mean(0))  # eager attention also returns its weights

    hooks = [layer.register_forward_hook(record) for layer in layers]
    decoder.set_attn_implementation("eager")
    try:
        for one in (NoPruning(), method):
            rows.clear()
            with one(loaded.model, processor=loaded.processor, **loaded.options(one)) as handle, torch.inference_mode():
                handle.forward(batch.images, **batch.inputs, logits_to_keep=1)
            found.append(to_numpy(torch.stack(rows).mean(0)))
        kept = handle.last[0]
    finally:
        decoder.set_attn_implementation(usual)
        for hook in hooks:
            hook.remove()
    if kept.kept != len(kept.selection.indices) or image.runs is not None:
        return None
    places = first + to_numpy(image.places[image.candidates]).astype(int)
    return found[0][places], found[1][first + int(image.places.min()) :][: kept.kept]


def _attended(
    columns: dict[str, list[Any]], selection: Selection, before: Values, after: Values
) -> dict[str, list[float]]:
    """Return the columns `before` and `after`."""
    spread, clusters = np.zeros(len(before)), columns["cluster"]
    for index, share in zip(selection.indices.tolist(), after.tolist(), strict=True):
        alone = index < 0 or clusters[index] is None
        members = [index] if alone else [i for i, other in enumerate(clusters) if other == clusters[index]]
        if index >= 0:
            spread[members] += share / len(members)
    return {"before": before.tolist(), "after": spread.tolist()}


def _note(encoded: VisualTokens, selection: Selection, question: str) -> str:
    notes = [f"selected for the question {question!r}"] if question else []
    if cls := int((selection.indices < 0).sum()):
        notes.append(f"{cls} kept token is the CLS token, which has no place in the image")
    if selection.merged is not None and bool(selection.merged.any()):
        notes.append(f"{int(selection.merged.sum())} of the kept tokens are mixtures of several")
    if len(encoded.grids) > 1:
        indices = selection.indices[selection.indices >= 0]
        other = int((encoded.layout.tile[indices] > 0).sum())
        notes.append(f"{other} kept tokens lie in {len(encoded.grids) - 1} further crops, which are not drawn")
    return "; ".join(notes)
