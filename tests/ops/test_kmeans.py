"""Seeding, refinement and representatives, and the random numbers of the draws."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import draw_image
from reference import clustering
from reference import noise as slow_noise
from reference.clustering import huber
from scipy_free import chi_square_limit
from torch import Tensor

from clustrs.ops import distances as indexing
from clustrs.ops.distances import squared_distances
from clustrs.ops.kmeans import centers, refine, representatives, seeding, unit_scale


@given(st.integers(0, 2**64 - 1), st.integers(1, 5), st.integers(1, 20))
def test_uniform_is_the_function_it_should_be(seed: int, steps: int, tokens: int) -> None:
    ours = indexing.uniform(seed, steps, tokens, torch.zeros((), dtype=torch.float64))
    theirs = [[slow_noise.uniform(seed, step, token) for token in range(tokens)] for step in range(steps)]
    assert ours.tolist() == theirs
    single = indexing.uniform(seed, steps, tokens, torch.zeros(()))
    assert single.double().tolist() == theirs
    assert single.min() > 0
    assert single.max() < 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_is_uniform_over_seeds_steps_and_tokens(axis: int) -> None:
    like = torch.zeros((), dtype=torch.float64)
    draws = [
        torch.stack([indexing.uniform(seed, 1, 1, like)[0, 0] for seed in range(4000)]),
        indexing.uniform(3, 4000, 1, like)[:, 0],
        indexing.uniform(3, 1, 4000, like)[0],
    ][axis]
    counts = np.histogram(draws.numpy(), bins=20, range=(0, 1))[0]
    assert ((counts - 200.0) ** 2 / 200).sum() < chi_square_limit(19)
    together = np.corrcoef(draws[:-1].numpy(), draws[1:].numpy())[0, 1]
    assert abs(together) < 5 / np.sqrt(len(draws))


@pytest.mark.parametrize("tau", [1.0, None])
def test_seeds_are_drawn_with_the_right_probabilities(tau: float | None) -> None:
    """The second and the third seed over many seeds of the generator, against the exact distribution."""
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(6, 3)) * 1.2
    weight = np.array([0.3, 1.0, 0.0, 0.6, 0.2, 0.5])
    squared = ((tokens[:, None] - tokens) ** 2).sum(-1)

    def cost(d: float) -> float:
        return d if tau is None else huber(float(np.sqrt(d)), tau)

    def chances(seeds: list[int]) -> np.ndarray:
        p = np.array([weight[i] * cost(min(squared[i, s] for s in seeds)) for i in range(6)])
        return p / p.sum()

    expected = np.zeros((6, 6))
    for second, p in enumerate(chances([1])):
        if p > 0:
            expected[second] = p * chances([1, second])

    distances, scale = squared_distances(torch.from_numpy(tokens)[None])
    scaled = unit_scale(torch.from_numpy(weight)[None])
    trials = 6000
    counts = np.zeros((6, 6))
    for seed in range(trials):
        first, second, third = seeding(distances, scale, scaled, 3, tau=tau, seed=seed)[0]
        assert first == 1
        counts[second, third] += 1
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - trials * expected)[possible] ** 2 / (trials * expected[possible])).sum()
    assert chi_square < chi_square_limit(int(possible.sum()) - 1)


def test_without_chances_the_heaviest_tokens_follow() -> None:
    tokens = torch.tensor([[0.0], [5.0], [0.0], [5.0], [5.0], [0.0]])[None]
    weight = torch.tensor([[0.1, 0.9, 0.3, 0.3, 0.5, 0.0]])
    seeds = seeding(*squared_distances(tokens), unit_scale(weight), 5, tau=1.0, seed=0)[0].tolist()
    assert seeds[0] == 1
    assert seeds[1] in (0, 2)
    assert seeds[2:] == [i for i in (4, 2, 3, 0) if i not in seeds[:2]]


def state_after(
    rounds: int, tokens: Tensor, weight: Tensor, k: int, tau: float, robust: bool, tolerance: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Labels [N] and centers [k, D] after some rounds from the seeding's seeds."""
    distances, scale = squared_distances(tokens[None])
    scaled = unit_scale(weight[None])
    huber_tau = tau if robust else None
    seeds = seeding(distances, scale, scaled, k, tau=tau, seed=0)
    labels, to_centers = refine(distances, scale, scaled, seeds, rounds=rounds, tolerance=tolerance, tau=huber_tau)
    return labels[0], centers(labels, to_centers, scaled, huber_tau)[0] @ tokens


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
def test_labels_and_centers_of_each_round_are_the_references(seed: int, rounds: int, robust: bool) -> None:
    image = draw_image(seed, 40, 3, zero_attention=0.2)
    tokens, weight = torch.from_numpy(image.tokens), torch.from_numpy(image.attention)
    method = SimpleNamespace(
        tau=1.0, distance="huber", seed=0, iterations=rounds, tolerance=0.0, centroid="huber" if robust else "mean"
    )
    seeds = clustering.seeding(method, image.tokens, image.attention, 6)
    expected, expected_centers = clustering.refine(method, image.tokens, image.attention, seeds)
    labels, ours = state_after(rounds, tokens, weight, 6, 1.0, robust)
    assert labels.tolist() == expected
    for center, our_center in zip(expected_centers, ours, strict=True):
        if center is not None:
            np.testing.assert_allclose(our_center.numpy(), center, atol=1e-9)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 1.0])
def test_a_image_that_is_done_waits_for_the_others(tolerance: float) -> None:
    """Convergence is per image: the rounds that another one still needs change nothing here."""
    images = [draw_image(seed, 60, 3) for seed in range(6)]
    tokens = torch.from_numpy(np.stack([p.tokens for p in images]))
    weight = unit_scale(torch.from_numpy(np.stack([p.attention for p in images])))
    distances, scale = squared_distances(tokens)
    seeds = seeding(distances, scale, weight, 7, tau=1.0, seed=0)
    labels, _ = refine(distances, scale, weight, seeds, rounds=8, tolerance=tolerance, tau=None)
    for b in range(6):
        alone, _ = state_after(8, tokens[b], weight[b], 7, 1.0, False, tolerance)
        assert torch.equal(labels[b], alone)
    first, _ = refine(distances, scale, weight, seeds, rounds=2, tolerance=tolerance, tau=None)
    assert torch.equal(labels, first) == (tolerance == 1.0)


def test_an_empty_cluster_gives_its_place_to_the_best_token_left() -> None:
    labels = torch.tensor([[0, 0, 3, 0, 3, 3]])
    score = torch.tensor([[0.1, 0.9, 0.4, 0.8, 0.2, 0.8]])
    kept, labels = representatives(labels, score, 4)
    assert kept[0].tolist() == [1, 2, 3, 5]
    # cluster 0 keeps token 1, cluster 3 token 5; empty cluster 1 takes token 3 (0.8), empty cluster 2 token 2 (0.4)
    assert labels[0].tolist() == [0, 0, 1, 2, 3, 3]
