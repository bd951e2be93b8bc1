"""The refinement: its objective, its stopping, its empty clusters."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import draw_image
from reference import clustering
from torch import Tensor

from clustrs.ops.geometry import squared_distances
from clustrs.ops.kmeans import centres, refine, representatives, seeding, unit_scale


def state_after(
    rounds: int, tokens: Tensor, weight: Tensor, k: int, tau: float, robust: bool, tolerance: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Labels [N] and centres [k, D] after some rounds from the seeding's seeds."""
    distances, scale = squared_distances(tokens[None])
    scaled = unit_scale(weight[None])
    huber_tau = tau if robust else None
    seeds = seeding(distances, scale, scaled, k, tau=tau, seed=0)
    labels, to_centres = refine(
        distances, scale, scaled, seeds, iterations=rounds, tolerance=tolerance, huber_tau=huber_tau
    )
    return labels[0], centres(labels, to_centres, scaled, huber_tau)[0] @ tokens


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(5, 80),
    k=st.integers(1, 12),
    tau=st.sampled_from([0.3, 1.0, 3.0]),
    zero_attention=st.sampled_from([0.0, 0.3]),
)
def test_the_huber_objective_never_rises(seed: int, n: int, k: int, tau: float, zero_attention: float) -> None:
    image = draw_image(seed, n, 4, zero_attention=zero_attention)
    tokens, weight = torch.from_numpy(image.tokens), torch.from_numpy(image.attention)
    before = np.inf
    for rounds in range(1, 9):
        labels, points = state_after(rounds, tokens, weight, min(k, n), tau, robust=True)
        radii = (tokens - points[labels]).norm(dim=-1).tolist()
        objective = sum(a * clustering.huber(r, tau) for a, r in zip(weight.tolist(), radii, strict=True))
        assert objective <= before * (1 + 1e-5) + 1e-12
        before = objective


@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 6), robust=st.booleans())
@settings(max_examples=40)
def test_labels_and_centres_of_each_round_are_the_references(seed: int, rounds: int, robust: bool) -> None:
    image = draw_image(seed, 40, 3, zero_attention=0.2)
    tokens, weight = torch.from_numpy(image.tokens), torch.from_numpy(image.attention)
    method = SimpleNamespace(
        tau=1.0, distance="huber", seed=0, iterations=rounds, tolerance=0.0, centroid="huber" if robust else "mean"
    )
    seeds = clustering.seeding(method, image.tokens, image.attention, 6)
    expected, expected_centres = clustering.refine(method, image.tokens, image.attention, seeds)
    labels, ours = state_after(rounds, tokens, weight, 6, 1.0, robust)
    assert labels.tolist() == expected
    for centre, our_centre in zip(expected_centres, ours, strict=True):
        if centre is not None:
            np.testing.assert_allclose(our_centre.numpy(), centre, atol=1e-9)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 1.0])
def test_a_image_that_is_done_waits_for_the_others(tolerance: float) -> None:
    """Convergence is per image: the rounds that another one still needs change nothing here."""
    images = [draw_image(seed, 60, 3) for seed in range(6)]
    tokens = torch.from_numpy(np.stack([p.tokens for p in images]))
    weight = unit_scale(torch.from_numpy(np.stack([p.attention for p in images])))
    distances, scale = squared_distances(tokens)
    seeds = seeding(distances, scale, weight, 7, tau=1.0, seed=0)
    labels, _ = refine(distances, scale, weight, seeds, iterations=8, tolerance=tolerance, huber_tau=None)
    for b in range(6):
        alone, _ = state_after(8, tokens[b], weight[b], 7, 1.0, False, tolerance)
        assert torch.equal(labels[b], alone)
    first, _ = refine(distances, scale, weight, seeds, iterations=2, tolerance=tolerance, huber_tau=None)
    assert torch.equal(labels, first) == (tolerance == 1.0)


def test_an_empty_cluster_gives_its_place_to_the_best_token_left() -> None:
    labels = torch.tensor([[0, 0, 3, 0, 3, 3]])
    score = torch.tensor([[0.1, 0.9, 0.4, 0.8, 0.2, 0.8]])
    kept, labels = representatives(labels, score, 4)
    assert kept[0].tolist() == [1, 2, 3, 5]
    # cluster 0 keeps token 1, cluster 3 token 5; empty cluster 1 takes token 3 (0.8), empty cluster 2 token 2 (0.4)
    assert labels[0].tolist() == [0, 0, 1, 2, 3, 3]
