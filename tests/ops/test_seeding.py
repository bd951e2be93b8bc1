"""The draws of the seeding, and the numbers behind them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import noise as slow_noise
from reference.clustering import huber
from scipy_free import chi_square_limit

from clustrs.ops import noise
from clustrs.ops.geometry import squared_distances
from clustrs.ops.kmeans import seeding, unit_scale


@given(st.integers(0, 2**64 - 1), st.integers(1, 5), st.integers(1, 20))
def test_uniform_is_the_function_it_should_be(seed: int, steps: int, tokens: int) -> None:
    ours = noise.uniform(seed, steps, tokens, torch.zeros((), dtype=torch.float64))
    theirs = [[slow_noise.uniform(seed, step, token) for token in range(tokens)] for step in range(steps)]
    assert ours.tolist() == theirs
    single = noise.uniform(seed, steps, tokens, torch.zeros(()))
    assert single.double().tolist() == theirs
    assert single.min() > 0
    assert single.max() < 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_is_uniform_over_seeds_steps_and_tokens(axis: int) -> None:
    like = torch.zeros((), dtype=torch.float64)
    draws = [
        torch.stack([noise.uniform(seed, 1, 1, like)[0, 0] for seed in range(4000)]),
        noise.uniform(3, 4000, 1, like)[:, 0],
        noise.uniform(3, 1, 4000, like)[0],
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
