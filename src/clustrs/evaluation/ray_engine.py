"""Engine for a Ray cluster: workers that hold the model answer units, and this process writes their records."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustrs.evaluation.config import Config
from clustrs.evaluation.runner import Engine, Unit, Worker, failed_record, one_line, open_task
from clustrs.evaluation.store import AnswerRecord
from clustrs.models.load import quiet_transformers
from clustrs.pruners import from_dict

TRIES = 4  # number of times that a unit is started: workers and nodes may die
LOSSES = 2 * TRIES  # number of workers, beyond the size of the pool, that may die without a unit finished in between


class RemoteWorker:
    """Worker in a process of its own."""

    def load(self, config: Config, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        quiet_transformers()
        self.worker = Worker(config)
        _ = self.worker.loaded

    def run(self, unit: Unit) -> list[list[AnswerRecord]]:
        return list(self.worker.run(unit))


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
            yield from WorkerPool(ray, config, self.workers, self.threads).run(units)
        finally:
            if started_here:
                ray.shutdown()


class WorkerPool:
    """Pool of the workers of a run; a unit of a worker that died is done again by another."""

    def __init__(self, ray: Any, config: Config, workers: int | None, threads: int) -> None:
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.ray, self.config, self.threads = ray, config, threads
        self.most = workers or gpus or max(1, int(resources.get("CPU", 1)) // threads)
        self.remote = ray.remote(RemoteWorker).options(num_cpus=threads, num_gpus=1 if gpus else 0)
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, Unit | None, int]] = {}
        """Worker, unit (None while it loads) and try, by Ray's reference to the call."""
        self.queue: deque[tuple[Unit, int]] = deque()
        self.lost = 0
        """Number of workers that died since a unit was last finished."""

    def run(self, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        self.queue.extend((unit, 1) for unit in units)
        count = min(len(units), self.most)
        for _ in range(count):
            self._start_worker()
        try:
            while self.queue or any(unit is not None for _, unit, _ in self.busy.values()):
                while self.queue and self.idle:
                    worker, (unit, tries) = self.idle.pop(), self.queue.popleft()
                    self.busy[worker.run.remote(unit)] = (worker, unit, tries)
                yield from self._next(count)
        finally:
            for worker in [*self.idle, *(worker for worker, _, _ in self.busy.values())]:
                self.ray.kill(worker)

    def _start_worker(self) -> None:
        worker = self.remote.remote()
        self.busy[worker.load.remote(self.config, self.threads)] = (worker, None, 0)

    def _next(self, count: int) -> list[list[AnswerRecord]]:
        """Wait for a worker to load or to finish a unit, or to die.

        One that died is replaced. A unit on which workers keep dying is split into its questions; a single question on
        which they do has failed.
        """
        (ready,), _ = self.ray.wait([*self.busy], num_returns=1)
        worker, unit, tries = self.busy.pop(ready)
        try:
            records: list[list[AnswerRecord]] | None = self.ray.get(ready)
        except self.ray.exceptions.RayActorError as error:
            reason = one_line(error)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (ValueError(str(cause)) if isinstance(cause, ValueError) else error) from None
        else:
            self.idle.append(worker)
            self.lost = self.lost if unit is None else 0
            return records or []
        self.lost += 1
        if self.lost > count + LOSSES:
            raise ValueError(f"workers keep dying, {self.lost} without a unit finished: {reason}")
        self._start_worker()
        if unit is None:
            return []
        if tries < TRIES:
            self.queue.appendleft((unit, tries + 1))
            return []
        if len(unit.items) > 1:
            self.queue.extend((replace(unit, items=(item,)), 1) for item in unit.items)
            return []
        reason = f"{tries} workers died while they answered this: {reason}"
        item = open_task(self.config).items[unit.items[0]]
        return [[failed_record(unit, from_dict(self.config.methods[i]), item, reason)] for i in unit.methods]
