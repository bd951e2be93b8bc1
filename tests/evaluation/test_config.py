"""What a run's configuration accepts, and how it is spelled out."""

from pathlib import Path
from typing import Any

import pytest

from clustrs.evaluation.config import (
    Config,
    differences,
    expand_corruptions,
    expand_methods,
    make_method,
    read_settings,
    shipped_configs,
)
from clustrs.pruners import list_methods


def config(**changes: Any) -> Config:
    return Config(**{"task": "scenes", "model": "mini-llava", "methods": expand_methods(["none"], [16]), **changes})


def test_methods_are_spelled_out_at_every_budget() -> None:
    found = expand_methods(["none", "clustrs", "random keep=3", "clustrs tau=2 shrink=false"], [16, 0.25])
    assert [(method["name"], method["keep"]) for method in found] == [
        ("none", 1.0),
        ("clustrs", 16),
        ("clustrs", 0.25),
        ("random", 3),
        ("clustrs", 16),
        ("clustrs", 0.25),
    ]
    assert [method.get("tau") for method in found] == [None, 1.0, 1.0, None, 2, 2]
    assert make_method(found[-1]).to_dict()["shrink"] is False
    assert {method["name"] for method in expand_methods(["all"], [16])} == set(list_methods())
    assert expand_methods(["clustrs", "clustrs tau=1.0"], [16]) == expand_methods(["clustrs"], [16])


def test_corruptions_are_spelled_out() -> None:
    assert expand_corruptions(["clean", "gaussian", "gaussian:0.5", "jpeg:10"]) == (
        "clean",
        "gaussian:0.1",
        "gaussian:0.5",
        "gaussian:1",
        "gaussian:2",
        "gaussian:3",
        "jpeg:10",
    )
    assert len(expand_corruptions(["paper"])) == 23


def test_to_json_and_back() -> None:
    one = config(corruptions=("clean", "jpeg:30"), seeds=(0, 3), limit=7, task_options={"present": True})
    assert Config.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "methods: give at least one"),
        ({"seeds": (1, 1)}, "seeds: give each once"),
        ({"corruptions": ("fog",)}, "corruption 'fog'"),
        ({"batch_size": 0}, "batch_size"),
        ({"scope": "page"}, "scope"),
        ({"methods": ({"name": "clust", "keep": 3},)}, "clust"),
        ({"methods": ({"keep": 3},)}, "give its name"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_differences_say_what_changed() -> None:
    before, now = config().to_json(), config(limit=5, seeds=(0, 1)).to_json()
    assert differences(before, now) == ["limit: was null, now 5", "seeds: now with 1"]
    assert differences(before, before) == []


def test_every_ready_configuration_is_valid() -> None:
    from clustrs.cli import parser
    from clustrs.cli.evaluate import configuration

    ready = [Path(name) for name in sorted(shipped_configs())]
    assert len(ready) >= 8
    for name in ready:
        found = configuration(parser().parse_args(["eval", "--config", str(name)]))
        assert found.methods
        assert found.corruptions


def test_a_configuration_file(tmp_path: Path) -> None:
    from clustrs.cli import parser
    from clustrs.cli.evaluate import configuration

    file = tmp_path / "mine.yaml"
    file.write_text("task: scenes\nmethods: [none, clustrs tau=2]\nkeep: [16, 0.5]\ncorrupt: gaussian\nbatch-size: 5\n")
    found = configuration(parser().parse_args(["eval", "--config", str(file), "--limit", "3", "--keep", "8,9"]))
    assert (found.batch_size, found.limit, len(found.corruptions)) == (5, 3, 5)
    assert [method["keep"] for method in found.methods] == [1.0, 8, 9]
    for text, message in (
        ("- a", "give a mapping"),
        ("a: [", "is not YAML"),
        ("taks: scenes", "unknown option 'taks'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            configuration(parser().parse_args(["eval", "--config", str(file)]))
    with pytest.raises(ValueError, match="ready ones are"):
        read_settings(Path("nothing"))
