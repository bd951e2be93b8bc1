"""How much a selection holds at once, beyond its input."""

import weakref

import pytest
import torch
from method_cases import draw_image, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clustrs import ClustRS, get_method


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages made inside, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.known and not self._is_input(storage, args, kwargs):
                    self.known.add(id(storage))
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _is_input(self, storage: torch.UntypedStorage, *inputs: object) -> bool:
        tensors_in = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        return any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in tensors_in)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


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
