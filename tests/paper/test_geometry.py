"""How tokens lie: every number against loops over the tokens of a tiny model."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
from paper.study_command import parts

from clustrs import ClustRS
from clustrs_paper.studies import geometry
from clustrs_paper.studies.images import VisionEncoder, own_images

Folders = Callable[[str, str], Path]


@pytest.mark.parametrize(("family", "tower"), [("llava", "clip"), ("llava_onevision", "siglip")])
def test_numbers(folder_of: Folders, images: list[Path], family: str, tower: str) -> None:
    folder = folder_of(family, tower)
    (part,) = parts(geometry, folder, *images, "--keep", 3)
    rows = {row["measure"]: row for row in part.rows}
    assert list(rows) == list(geometry.MEASURES)
    encoder = VisionEncoder(geometry.GeometryConfig(model=str(folder)))
    found = [by_loops(encoder, path) for path in images]
    for name in found[0]:
        assert rows[name]["mean"] == pytest.approx(mean(one[name] for one in found), rel=1e-4), name
        assert rows[name]["low"] <= rows[name]["mean"] <= rows[name]["high"]
        assert rows[name]["images"] == 3
    words = encoder.model.get_input_embeddings().weight.detach().double()
    assert rows["word_norm"]["mean"] == pytest.approx(mean(float(word.norm()) for word in words))
    assert len(part.findings.splitlines()) == 1 + len(rows)


def by_loops(encoder: VisionEncoder, path: Path) -> dict[str, float]:
    (encoded,) = encoder.encode(own_images([str(path)]))
    (selection,) = encoder.select(ClustRS(keep=3), [encoded])
    tokens, scores = encoded.tokens.double(), encoded.scores.double()
    assert selection.labels is not None
    assert selection.centroids is not None
    centroids = selection.centroids.double()
    residuals = [float((t - centroids[label]).norm()) for t, label in zip(tokens, selection.labels, strict=True)]
    norms = [float(token.norm()) for token in tokens]
    between = [[float((a - b).norm()) for b in tokens] for a in tokens]
    centerd = tokens - tokens.mean(0)
    variances = torch.linalg.eigvalsh(centerd.T @ centerd)
    bonus = [max(0.0, norm - mean(norms)) for norm in norms]
    salient = [float(a) + 2 * float(scores.mean()) * b for a, b in zip(scores, bonus, strict=True)]
    return {
        "first_direction": float(variances[-1] / variances.sum()),
        "norm": mean(norms),
        "norm_ratio": float(torch.tensor(norms).quantile(0.95)) / median(norms),
        "nearest_distance": mean(min(d for j, d in enumerate(row) if j != i) for i, row in enumerate(between)),
        "distance": median(between[i][j] for i, j in combinations(range(len(tokens)), 2)),
        "residual": mean(residuals),
        "beyond_tau": mean(float(r > 1) for r in residuals),
        "attention_ratio": float(scores.max()) / median(map(float, scores)),
        "salience_ratio": max(salient) / median(salient),
    }


def test_files(folder_of: Folders, images: list[Path], tmp_path: Path) -> None:
    (part,) = parts(geometry, folder_of("llava", "clip"), *images[:1], "--keep", 3)
    written: Any = part.save(tmp_path)
    assert [path.name for path in written] == ["geometry.png", "geometry.svg", "geometry.csv"]
    assert part.rows[0]["low"] is None
