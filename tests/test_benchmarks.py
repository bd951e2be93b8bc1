"""benchmarks/selection.py: that it runs, and what it counts as a launch."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import selection
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
