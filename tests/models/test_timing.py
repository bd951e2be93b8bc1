"""An accelerator is waited for when timing is asked for, and not otherwise."""

from math import isnan

import pytest
import torch

from clustrs.models.scoring import StageTimer, now, timing


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    waits: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("waited"))
    return waits


def test_an_accelerator_is_not_waited_for(waits: list[str]) -> None:
    clock = StageTimer(torch.device("cuda"))
    with clock.time("vision"), clock.time("scoring"):
        pass
    assert waits == []
    assert isnan(clock.seconds["vision"])
    assert isnan(clock.seconds["scoring"])
    assert clock.seconds["selection"] == 0


def test_it_is_waited_for_while_timing(waits: list[str]) -> None:
    clock = StageTimer(torch.device("cuda"))
    with timing(), clock.time("vision"), clock.time("scoring"):
        pass
    assert len(waits) == 4
    assert clock.seconds["vision"] >= 0
    with clock.time("selection"):
        pass
    assert len(waits) == 4
    now(torch.device("cuda"))
    assert len(waits) == 5


def test_a_cpu_is_always_timed(waits: list[str]) -> None:
    clock = StageTimer(torch.device("cpu"))
    with clock.time("vision"):
        torch.ones(100).sum()
    assert clock.seconds["vision"] > 0
    assert waits == []
