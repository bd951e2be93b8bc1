"""How far kept tokens are from the clean ones.

ClustRS selects in the noisy image. A kept token y has a clean counterpart x, at the same position, and a centroid c;
the shrinkage gives alpha y + (1 - alpha) c. Distances to x are relative: the mean over an image's kept tokens, divided
by the mean norm of all tokens of the clean image. Changes are relative to the distance before shrinkage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs.app.projection import to_numpy
from clustrs.corruptions import Corruption
from clustrs.evaluation.metrics import Estimate, estimates
from clustrs.pruners import Selection
from clustrs_paper.studies.images import EncodedImage

CHANGES = ("after", "constant", "bound", "centroid")
"""What is compared with the distance before; "centroid" is a shrinkage with alpha 0."""
Values = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of one image, one number each: `before` and `after` are distances from the clean token.

    With d = y - c and e = x - c the squared distance after a shrinkage by alpha is alpha^2 dd - 2 alpha de + ee.
    `norm` is the mean norm of the clean image's tokens.
    """

    before: Values
    after: Values
    alpha: Values
    dd: Values
    de: Values
    ee: Values
    norm: float

    def distances(self, alpha: Values | float) -> Values:
        """From the clean tokens, had the shrinkage been by `alpha`."""
        return np.sqrt(np.maximum(0.0, alpha**2 * self.dd - 2 * alpha * self.de + self.ee))


def compare(clean: EncodedImage, noisy: EncodedImage, selection: Selection) -> KeptTokens:
    """A selection in a noisy image, measured against the clean one."""
    centroids, alpha = selection.centroids, selection.alpha
    assert centroids is not None
    assert alpha is not None
    every = to_numpy(clean.tokens)
    indices = selection.indices.cpu().numpy()
    x, y = every[indices], to_numpy(noisy.tokens)[indices]
    c, shrunk = to_numpy(centroids), to_numpy(selection.tokens)
    d, e = y - c, x - c
    return KeptTokens(
        before=np.linalg.norm(y - x, axis=1),
        after=np.linalg.norm(shrunk - x, axis=1),
        alpha=to_numpy(alpha),
        dd=(d * d).sum(1),
        de=(d * e).sum(1),
        ee=(e * e).sum(1),
        norm=float(np.linalg.norm(every, axis=1).mean()),
    )


def best_alpha(dd: Values | float, de: Values | float) -> Values:
    """The alpha in [0, 1] with the least squared distance; 1 where token and centroid are the same."""
    dd, de = np.asarray(dd, dtype=np.float64), np.asarray(de, dtype=np.float64)
    return np.clip(np.divide(de, dd, out=np.ones_like(dd), where=dd > 0), 0.0, 1.0)


def summarise(keep: int | float, corruption: Corruption | None, kept: Sequence[KeptTokens]) -> Row:
    """Means over the images with 95 % intervals of a bootstrap over them; alphas are over all kept tokens."""
    constant = float(best_alpha(sum(k.dd.sum() for k in kept), sum(k.de.sum() for k in kept)))
    series: dict[str, list[float]] = {name: [] for name in ("before", *CHANGES)}
    for k in kept:
        each = {
            "before": k.before,
            "after": k.after,
            "constant": k.distances(constant),
            "bound": k.distances(best_alpha(k.dd, k.de)),
            "centroid": k.distances(0.0),
        }
        for name, distances in each.items():
            series[name].append(float(distances.mean()) / k.norm)
    for name in CHANGES:
        pairs = zip(series["before"], series[name], strict=True)
        series[f"{name}_change"] = [now / before - 1 if before else np.nan for before, now in pairs]
    row: Row = {
        "keep": keep,
        "corruption": "clean" if corruption is None else corruption.name,
        "level": None if corruption is None else corruption.level,
        "images": len(kept),
        "tokens": sum(len(k.before) for k in kept),
    }
    for name, estimate in zip(series, estimates(np.array(list(series.values()))), strict=True):
        row |= spread(name, estimate)
    alphas = np.concatenate([k.alpha for k in kept])
    sides = np.sign(np.concatenate([k.after - k.before for k in kept]))
    row |= {"mean_alpha": float(alphas.mean()), "best_constant_alpha": constant}
    return row | {"share_nearer": float((sides < 0).mean()), "share_farther": float((sides > 0).mean())}


def spread(name: str, estimate: Estimate) -> Row:
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
