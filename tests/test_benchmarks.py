"""benchmarks/selection.py: that it runs, and what it counts as a launch; benchmarks/serving.py: where pruning pays."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import chunks, scaling, selection, serving_report
from clustrs import list_methods

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_selection_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    size = ["--sizes", "40x8", "--keep", "3", "5", "--batch", "1", "2", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "benchmarks/selection.py", *size, "--seconds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "selection.json").read_text())
    methods = {name for name in list_methods("encoder") if name != "none"} | {selection.FLOOR, selection.LOOP}
    assert stored["machine"]["device"] == "cpu"
    assert {(row["method"], row["keep"], row["batch"]) for row in stored["rows"]} == {
        (method, keep, batch) for method in methods for keep in (3, 5) for batch in (1, 2)
    }
    assert all(row["launches"] > 0 and row["ms"] > 0 for row in stored["rows"])
    assert "| launches |" in (tmp_path / "selection.md").read_text()
    assert (tmp_path / "selection.png").stat().st_size > 1000


def test_launches_of_kernels_and_of_graphs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the profiler names them on CUDA and ROCm."""
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel", "cudaGraphLaunch", "hipGraphLaunch"]
    other = ["aten::mul", "cudaMemcpyAsync", "cudaDeviceSynchronize"]

    @contextmanager
    def profile(activities: Any) -> Any:
        yield SimpleNamespace(events=lambda: [SimpleNamespace(name=name) for name in names + other])

    monkeypatch.setattr(selection, "profile", profile)
    monkeypatch.setattr(selection, "synchronize", lambda tokens: None)
    tokens: Any = SimpleNamespace(device=torch.device("cuda"))
    assert selection.count_launches(lambda tokens: None, tokens) == len(names)


def test_scaling_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        text = scaling.run(tmp_path, [2, 4], 10, (30, 60), ["clustrs", "divprune"])
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "scaling.json").read_text())
    names = {scaling.PRODUCT, scaling.ALL, "clustrs", "divprune"}
    assert {(row["n"], row["keep"], row["method"]) for row in rows} == {
        (n, k, name) for n in (30, 60) for k in (2, 4) for name in names
    }
    assert all(row["ms"] > 0 and row["mb"] >= 0 for row in rows)
    assert (tmp_path / "scaling.md").read_text() == text + "\n"
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_the_memory_of_a_call_is_counted() -> None:
    _, used = scaling.cost(lambda states: torch.ones(10_000_000).sum(), {})
    assert 39e6 < used < 60e6


def test_memory_of_chunks() -> None:
    threads = torch.get_num_threads()
    try:
        rows = chunks.measure([2, 12], [None, 2], keep=4)
    finally:
        torch.set_num_threads(threads)
    used = {(row["frames"], row["chunk"]): row["mb"] for row in rows}
    assert set(used) == {(2, None), (2, 2), (12, None), (12, 2)}
    assert used[12, None] > 15  # features of 12 x 256 patches, and the states that they come from
    assert used[12, 2] < used[12, None]
    assert len(chunks.table(rows).splitlines()) == 4


def test_where_pruning_pays() -> None:
    """Ten tokens of text and 100 of an image: a third of the way from 1.25 to 0.5 of the plain server's time."""

    def pays(rate: float) -> float | None:
        speeds = [(None, 110, 10.0), (1.0, 110, 8.0), (10, 20, rate)]
        shared = {"model": "m", "at_once": 8}
        rows = [{**shared, "keep": k, "prompt_tokens": n, "requests_per_second": r} for k, n, r in speeds]
        (found,) = serving_report.break_even(rows)
        share: float | None = found["share"]
        return share

    assert pays(20.0) == pytest.approx(0.3)
    assert pays(9.0) is None
