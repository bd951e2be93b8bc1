"""The grid over Ray: the same records as the local engine's, also when a node dies in the middle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from clustrs import run
from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.report import write_report
from clustrs.evaluation.runner import Engine
from clustrs.evaluation.store import key_of, read_answers
from clustrs_ray import RayEngine

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("task")
    tiny_models.build("llava", "clip", root / "model")
    entries = []
    for number in range(12):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        entries.append({"id": str(number), "image": f"{number}.png", "question": f"Why {number}?", "answer": "x"})
    (root / "5.png").write_text("not an image")
    (root / "questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return Config(
        task="custom",
        data=str(root),
        model=str(root / "model"),
        methods=expand_methods(["none", "clustrs"], [4]),
        corruptions=("clean", "gaussian:0.5"),
        batch_size=2,
        max_new_tokens=3,
    )


@pytest.fixture(scope="module")
def local(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    run(config, folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def expected(local: Path) -> dict[Any, Any]:
    return {key_of(record): record for record in read_answers(local)}


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_node_dies_in_the_middle(
    config: Config, local: Path, expected: dict[Any, Any], cluster: Any, tmp_path: Path
) -> None:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    engine = RayEngine(cluster.address)

    class WithAnAccident(Engine):
        def run(self, config: Config, units: Any) -> Iterator[Any]:
            for number, records in enumerate(engine.run(config, units)):
                if number == 5:
                    cluster.remove_node(second, allow_graceful=False)
                yield records

    run(config, tmp_path, WithAnAccident(), progress=False)
    records = list(read_answers(tmp_path))
    assert len(records) == len(expected) == 12 * 2 * 2
    assert {key_of(record): record for record in records} == expected
    reports = [write_report(folder).read_bytes() for folder in (tmp_path, local)]
    assert reports[0] == reports[1]
    assert sum(record.error is not None for record in records) == 4


def test_mistakes_of_a_worker_are_told_once(config: Config, cluster: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    wrong = replace(config, model=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"no such folder|could not be loaded"):
        run(wrong, tmp_path / "run", RayEngine(cluster.address), progress=False)
    assert list(read_answers(tmp_path / "run")) == []


def test_no_cluster_at_an_address(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Ray cluster answers"):
        run(config, tmp_path, RayEngine("127.0.0.1:1"), progress=False)
