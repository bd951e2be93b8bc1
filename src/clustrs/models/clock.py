"""The one clock: wall seconds by part of the work.

The work of an accelerator has to be waited for before it can be timed, which slows it down. So it is only timed inside
`with timing():`; a CPU has nothing to wait for and is always timed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import nan
from time import perf_counter

import torch

_timing: ContextVar[bool] = ContextVar("timing", default=False)


@contextmanager
def timing() -> Iterator[None]:
    """Wait for the device around every part of the work in this block, so that each gets its own seconds."""
    before = _timing.set(True)
    try:
        yield
    finally:
        _timing.reset(before)


def runs_ahead(device: torch.device) -> bool:
    """Whether calls return before the device has done their work."""
    return device.type not in ("cpu", "meta")


def now(device: torch.device) -> float:
    """The time when the device has done all its work."""
    if runs_ahead(device):
        torch.accelerator.synchronize()
    return perf_counter()


class Clock:
    """Seconds by part of the work; NaN for what ran on an accelerator outside `timing`. What is timed inside another
    part counts for itself and not for that part."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"vision": 0.0, "scoring": 0.0, "selection": 0.0}
        self._inner = [0.0]

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        if torch.compiler.is_compiling():
            yield
            return
        if runs_ahead(self.device) and not _timing.get():
            self.seconds[part] = nan
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
