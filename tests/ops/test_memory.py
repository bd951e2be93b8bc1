"""How much a selection holds at once, beyond its input."""

import pytest
import torch
from method_cases import draw_image, tensors
from peak_memory import Peak

from clustrs import ClustRS, get_method


def test_the_counter_counts() -> None:
    with Peak() as peak:
        a = torch.zeros(1000)
        b = a + 1
        del a
        b.view(10, 100).add_(1)
        c = b * 2
        del b, c
    assert peak.most == 8000
    assert peak.now == 0


@pytest.mark.parametrize(("n", "width", "keep"), [(576, 4096, 16), (576, 4096, 144), (729, 3584, 180), (1440, 512, 50)])
@pytest.mark.parametrize("batch", [1, 3])
def test_peak_memory_of_clustrs(n: int, width: int, keep: int, batch: int) -> None:
    tokens, attention, _ = tensors([draw_image(0, n, width)] * batch)
    with Peak() as peak:
        ClustRS(keep=keep).select(tokens, attention)
    assert peak.most / 4 / batch <= 4 * n**2 + 2 * n * width


@pytest.mark.parametrize("name", ["clustrs", "clustermeans", "divprune", "mmr"])
def test_peak_memory_with_many_tokens(name: str) -> None:
    """A sixth of the N x N distances, and no more than a second copy of tokens of width 1000."""
    n = 6000
    tokens, attention, _ = tensors([draw_image(0, n, 32)])
    with Peak() as peak:
        get_method(name, keep=16).select(tokens, attention)
    assert peak.most / 4 <= n * 1000
