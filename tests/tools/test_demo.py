"""The end of `make demo`: its sentence and its table are those of the runs."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import recorded_run

from clustrs.evaluation.config import read_settings
from clustrs.evaluation.report.summary import LATENCY_FILE, Latency
from clustrs.evaluation.results import load_run
from tools import demo

METHODS: list[dict[str, Any]] = [
    {"name": "none", "keep": 1.0},
    *({"name": name, "keep": keep} for name in ("clustermeans", "clustrs") for keep in (4, 8)),
]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    both = recorded_run.write_run(
        tmp_path / "both", methods=METHODS, corruptions=["clean", "gaussian:0.1", "gaussian:0.2"]
    )
    plain = recorded_run.write_run(
        tmp_path / "plain", methods=METHODS[3:], corruptions=["clean", "gaussian:0.1", "gaussian:0.2"]
    )
    parts = {"vision": 200.0, "selection": 10.0, "prefill": 30.0, "decode": 2.0}
    times = Latency("a machine", 2, tuple((method, parts) for method in METHODS))
    (both / LATENCY_FILE).write_bytes(msgspec.json.encode(times))
    return [both, plain]


def test_the_sentence_and_the_table_are_those_of_the_runs(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([str(folder) for folder in folders]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert max(map(len, lines)) <= 100
    scores = load_run(folders[0]).scores[:, :, 0]  # methods, conditions, items
    clean, noisy = 100 * scores[:, 0].mean(-1), 100 * scores[:, 1:].mean((1, 2))
    kept = [f"{100 * own[1] / own[0]:.0f} %" for own in (clean, noisy)]
    expected = f"ClusterMeans keeps {kept[0]} of the unpruned score with 4 of 20 tokens ({kept[1]} on noisy images)."
    assert lines[0] == expected
    (row,) = [line for line in lines if line.startswith("all tokens")]
    assert f"{clean[0]:.1f}" in row
    assert f"{noisy[0]:.1f}" in row
    assert row.split()[-3:-1] == ["242", "32"]
    start = lines.index(next(line for line in lines if line.startswith("4 tokens, place and weight")))
    cells = lines[start + 1].split()
    assert cells[:3] == ["ClusterMeans", "(ours)", f"{clean[1]:.1f}"]
    plain = 100 * load_run(folders[1]).scores[:, 0, 0].mean(-1)
    start = lines.index(next(line for line in lines if line.startswith("8 tokens, as published")))
    assert lines[start + 1].split()[:4] == ["ClustRS", "(the", "paper)", f"{plain[1]:.1f}"]


def test_without_times_none_are_shown(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    (folders[0] / LATENCY_FILE).unlink()
    demo.main([str(folder) for folder in folders])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("all tokens")]
    assert row.split()[-3:-1] == ["-", "-"]


def test_fewer_tokens_take_less_cache(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    demo.main([str(folder) for folder in folders])
    lines = capsys.readouterr().out.splitlines()
    sizes = [float(line.split()[-1].replace(",", "")) for line in lines if "ClusterMeans (ours)" in line]
    (whole,) = [float(line.split()[-1].replace(",", "")) for line in lines if line.startswith("all tokens")]
    assert np.all(np.diff([*sizes, whole]) > 0)


def test_the_demo_measures_what_its_end_shows() -> None:
    settings = read_settings(Path("demo"))
    assert settings["methods"][0] == "none"
    assert set(demo.LABELS) <= set(settings["methods"])
    assert (settings["positions"], settings["attention"]) == ("original", "proportional")
