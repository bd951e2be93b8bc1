"""Bytes of tensors that are alive at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
