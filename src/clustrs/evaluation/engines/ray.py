"""The grid over a Ray cluster: units go to workers that hold the model, their rows come back to be written here."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from clustrs.evaluation.config import Config
from clustrs.evaluation.run import Engine, Row, Unit, Worker

TRIES = 4
"""How often a unit is started before the run gives up: workers and nodes may die."""


class RemoteWorker:
    """A worker in a process of its own."""

    def load(self, config: Config, threads: int) -> None:
        import torch

        from clustrs.cli.ask import quiet_transformers

        torch.set_num_threads(threads)
        quiet_transformers()
        self.worker = Worker(config)

    def run(self, unit: Unit) -> list[list[Row]]:
        return list(self.worker.run(unit))


def ray_engine(address: str | None = None, workers: int | None = None, threads: int = 1) -> Engine:
    """An engine for `runner.run`. `address` is a cluster's (or "auto"); without one, Ray is started on this machine."""

    def engine(config: Config, left: Sequence[Unit]) -> Iterator[list[Row]]:
        import ray

        if not left:
            return
        mine = not ray.is_initialized()
        if mine:
            try:
                reach(address)
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError) as error:
                raise ValueError(f"--address {address}: no Ray cluster answers there ({error})") from None
        try:
            yield from spread(ray, config, left, workers, threads)
        finally:
            if mine:
                ray.shutdown()

    return engine


def reach(address: str | None) -> None:
    """Look whether somebody listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def spread(ray: Any, config: Config, left: Sequence[Unit], workers: int | None, threads: int) -> Iterator[list[Row]]:
    """Keep every worker busy that has a place and a model; what a lost one was doing is done again by another."""
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(len(left), workers or gpus or max(1, int(resources.get("CPU", 1)) // threads))
    start = ray.remote(RemoteWorker).options(num_cpus=threads, num_gpus=1 if gpus else 0)
    queue = deque((unit, 1) for unit in left)
    idle: list[Any] = []
    loading: dict[Any, Any] = {}
    busy: dict[Any, tuple[Any, Unit, int]] = {}
    lost = 0

    def hire() -> None:
        worker = start.remote()
        loading[worker.load.remote(config, threads)] = worker

    for _ in range(count):
        hire()
    try:
        while queue or busy:
            while queue and idle:
                worker, (following, tries) = idle.pop(), queue.popleft()
                busy[worker.run.remote(following)] = (worker, following, tries)
            (ready,), _ = ray.wait([*loading, *busy], num_returns=1)
            worker, unit, tries = (loading.pop(ready), None, 0) if ready in loading else busy.pop(ready)
            try:
                rows = ray.get(ready)
            except ray.exceptions.RayActorError as error:
                lost += 1
                if max(tries, lost - count) >= TRIES:
                    raise ValueError(f"workers keep dying: {' '.join(str(error).split())[:300]}") from None
                if unit is not None:
                    queue.appendleft((unit, tries + 1))
                hire()
                continue
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (ValueError(str(cause)) if isinstance(cause, ValueError) else error) from None
            idle.append(worker)
            if unit is not None:
                yield from rows
    finally:
        for worker in [*idle, *loading.values(), *(worker for worker, _, _ in busy.values())]:
            ray.kill(worker)
