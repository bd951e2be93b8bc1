"""The one clock: wall seconds, with the device waited for, so that each part of the work gets its own time."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


def now(device: torch.device) -> float:
    """The time when the device has done all its work."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize()
    return perf_counter()


class Clock:
    """Seconds by part of the work. What is timed inside another part counts for itself and not for that part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"vision": 0.0, "scoring": 0.0, "selection": 0.0}
        self._inner = [0.0]

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        if torch.compiler.is_compiling():
            yield
            return
        start = now(self.device)
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = now(self.device) - start
            self.seconds[part] += whole - self._inner.pop()
            self._inner[-1] += whole
