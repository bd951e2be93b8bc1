"""How the Ray engine takes the loss of workers, with a stand-in for Ray that loses those it is told to."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import clustrs_ray as engine
from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.runner import Unit, Worker, failed_record, units
from clustrs.evaluation.store import AnswerRecord

Loses = Callable[[Unit | None], bool]
"""Whether the worker dies on this unit, or while it loads (None)."""


class Died(Exception):
    """What Ray raises when an actor is gone."""


class Failed(Exception):
    """What Ray raises when a call raised."""

    cause: Exception


class FakeRay:
    """Calls are made when their results are asked for, the oldest first."""

    exceptions = SimpleNamespace(RayActorError=Died, RayTaskError=Failed)

    def __init__(self, loses: Loses, cpus: int = 2, nodes_die: bool = False) -> None:
        self.loses = loses
        self.cpus = cpus
        self.nodes_die = nodes_die  # and take the room for a worker with them
        self.placed: set[int] = set()
        self.started = 0
        self.alive: set[int] = set()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, *_: Any) -> Any:
        self.started += 1
        number = self.started
        self.alive.add(number)
        run = SimpleNamespace(remote=lambda unit: (unit, number, self.started))
        return SimpleNamespace(run=run, number=number)

    def wait(self, calls: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        for number in sorted({number for _, number, _ in calls} - self.placed):
            if len(self.placed) < self.cpus:
                self.placed.add(number)
        ready = [call for call in calls if call[1] in self.placed]
        assert ready, "it waits for a worker that has no room"
        return ready[:num_returns], [call for call in calls if call not in ready[:num_returns]]

    def get(self, call: Any) -> Any:
        unit, number, _ = call
        if self.loses(unit):
            self.alive.discard(number)
            self.placed.discard(number)
            self.cpus -= self.nodes_die
            raise Died("the worker\nis gone")
        return [] if unit is None else [[record(unit, item) for item in unit.items]]

    def kill(self, worker: Any) -> None:
        self.alive.discard(worker.number)


CONFIG = Config(task="scenes", model="mini-llava", methods=expand_methods(["none"], [4]), limit=12, batch_size=1)


def record(unit: Unit, item: int) -> AnswerRecord:
    worker = Worker(CONFIG)
    return failed_record(unit, worker.methods[0], worker.task.items[item], "made up")


def answer(loses: Loses, batch_size: int = 1) -> tuple[FakeRay, list[AnswerRecord]]:
    ray = FakeRay(loses)
    left = units(Config(**{**CONFIG.to_json(), "batch_size": batch_size}), Worker(CONFIG).task, set())
    batches = engine.answer(ray, CONFIG, left, None, 1)
    return ray, [record for batch in batches for record in batch]


def test_losses_are_no_matter_as_long_as_work_gets_done() -> None:
    """Every unit costs the worker that tries it first: twelve losses of two workers."""
    tried: set[Unit] = set()

    def first(unit: Unit | None) -> bool:
        lost = unit is not None and unit not in tried
        tried.update([unit] if unit is not None else [])
        return lost

    ray, records = answer(first)
    assert len({record.item for record in records}) == len(records) == 12
    assert {record.error for record in records} == {"made up"}
    assert ray.started == 2 + 12  # it used to give up at the sixth loss
    assert not ray.alive


def test_a_node_that_dies_leaves_no_room_for_another_worker() -> None:
    """The units are for the worker that is left, and nobody waits for the one that cannot start."""
    fails = iter([False, False, False, True])
    ray = FakeRay(lambda unit: next(fails, False), nodes_die=True)
    batches = engine.answer(ray, CONFIG, units(CONFIG, Worker(CONFIG).task, set()), None, 1)
    records = [record for batch in batches for record in batch]
    assert len({record.item for record in records}) == len(records) == 12
    assert (ray.started, ray.cpus) == (3, 1)
    assert not ray.alive


@pytest.mark.parametrize("loading", [True, False])
def test_a_cluster_on_which_nothing_gets_done(loading: bool) -> None:
    ray = FakeRay(lambda unit: (unit is None) == loading)
    with pytest.raises(ValueError, match="workers keep dying, 11 without a unit finished: the worker is gone"):
        list(engine.answer(ray, CONFIG, units(CONFIG, Worker(CONFIG).task, set()), None, 1))
    assert not ray.alive


def test_a_question_that_kills_its_workers_fails_alone() -> None:
    _, records = answer(lambda unit: unit is not None and 7 in unit.items, batch_size=4)
    assert len({record.item for record in records}) == len(records) == 12
    lost = [record for record in records if record.error != "made up"]
    assert [record.item for record in lost] == [Worker(CONFIG).task.items[7].id]
    assert lost[0].error == "4 workers died while they answered this: the worker is gone"


def test_nothing_here_imports_the_command_line() -> None:
    folder = Path(engine.__file__).parent
    assert not [path.name for path in folder.rglob("*.py") if "clustrs.cli" in path.read_text()]
