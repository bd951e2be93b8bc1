"""Engine for a Ray cluster: workers that hold the model answer units, and this process writes their records."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from clustrs.evaluation.config import Config
from clustrs.evaluation.runner import Engine, Unit, Worker, failed_record, one_line, open_task
from clustrs.evaluation.store import AnswerRecord
from clustrs.models.load import quiet_transformers
from clustrs.pruners import from_dict

__version__ = "0.2.0"
TRIES = 4  # number of times that a unit is started: workers and nodes may die
LOSSES = 2 * TRIES  # number of workers, beyond the size of the pool, that may die without a unit finished in between


class RemoteWorker:
    """Worker in a process of its own."""

    def __init__(self, config: Config, threads: int) -> None:
        self.config, self.threads = config, threads

    @cached_property
    def worker(self) -> Worker:
        import torch

        torch.set_num_threads(self.threads)
        quiet_transformers()
        return Worker(self.config)

    def run(self, unit: Unit | None) -> list[list[AnswerRecord]]:
        """Return the records of a unit; None only loads the model."""
        _ = self.worker.loaded
        return [] if unit is None else list(self.worker.run(unit))


@dataclass(frozen=True)
class RayEngine(Engine):
    """Engine that spreads units over a cluster at `address` (or "auto"); without one, Ray starts on this machine."""

    address: str | None = None
    workers: int | None = None
    threads: int = 1

    def run(self, config: Config, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        import ray

        if not units:
            return
        started_here = not ray.is_initialized()
        if started_here:
            host, colon, port = (self.address or "").rpartition(":")
            try:
                if colon and port.isdigit() and "/" not in host:  # connect once, since Ray would try for minutes
                    socket.create_connection((host, int(port)), timeout=10).close()
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError) as error:
                raise ValueError(f"--address {self.address}: no Ray cluster answers there ({error})") from None
        try:
            yield from answer(ray, config, units, self.workers, self.threads)
        finally:
            if started_here:
                ray.shutdown()


def answer(
    ray: Any, config: Config, units: Sequence[Unit], workers: int | None, threads: int
) -> Iterator[list[AnswerRecord]]:
    """Answer units by a pool of workers; those that die are replaced, and their units done again.

    A unit on which workers keep dying is split into its questions; a single question on which they do has failed.
    """
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(len(units), workers or gpus or max(1, int(resources.get("CPU", 1)) // threads))
    remote = ray.remote(RemoteWorker).options(num_cpus=threads, num_gpus=1 if gpus else 0)
    idle: list[Any] = []
    busy: dict[Any, tuple[Any, Unit | None, int]] = {}  # worker, unit (None while it loads), try; by Ray's reference
    queue = deque((unit, 1) for unit in units)
    lost = 0  # workers that died since a unit was last finished
    unit: Unit | None

    def start() -> None:  # there may be no room for it: units go only to workers that have loaded
        worker = remote.remote(config, threads)
        busy[worker.run.remote(None)] = (worker, None, 0)

    try:
        for _ in range(count):
            start()
        while queue or any(unit is not None for _, unit, _ in busy.values()):
            while queue and idle:
                worker, (unit, tries) = idle.pop(), queue.popleft()
                busy[worker.run.remote(unit)] = (worker, unit, tries)
            (ready,), _ = ray.wait([*busy], num_returns=1)
            worker, unit, tries = busy.pop(ready)
            try:
                records = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (ValueError(str(cause)) if isinstance(cause, ValueError) else error) from None
            except ray.exceptions.RayActorError as error:
                lost, reason = lost + 1, one_line(error)
                if lost > count + LOSSES:
                    raise ValueError(f"workers keep dying, {lost} without a unit finished: {reason}") from None
                start()
                if unit is None:
                    continue
                if tries < TRIES:
                    queue.appendleft((unit, tries + 1))
                elif len(unit.items) > 1:
                    queue.extend((replace(unit, items=(item,)), 1) for item in unit.items)
                else:
                    item, methods = open_task(config).items[unit.items[0]], [config.methods[i] for i in unit.methods]
                    reason = f"{tries} workers died while they answered this: {reason}"
                    yield [failed_record(unit, from_dict(method), item, reason) for method in methods]
            else:
                lost = lost if unit is None else 0
                idle.append(worker)
                yield from records
    finally:
        for worker in [*idle, *(worker for worker, _, _ in busy.values())]:
            ray.kill(worker)
