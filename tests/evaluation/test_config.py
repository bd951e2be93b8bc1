"""What a run's configuration accepts, and how it is spelled out."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustrs.evaluation.config import (
    Config,
    differences,
    expand_corruptions,
    expand_methods,
    read_settings,
    shipped_configs,
)
from clustrs.pruners import from_dict, list_methods


def config(**changes: Any) -> Config:
    return Config(**{"task": "scenes", "model": "mini-llava", "methods": expand_methods(["none"], [16]), **changes})


def test_methods_are_spelled_out_at_every_budget() -> None:
    methods = expand_methods(["none", "clustrs", "random keep=3", "clustrs tau=2 shrink=false"], [16, 0.25])
    assert [(method["name"], method["keep"]) for method in methods] == [
        ("none", 1.0),
        ("clustrs", 16),
        ("clustrs", 0.25),
        ("random", 3),
        ("clustrs", 16),
        ("clustrs", 0.25),
    ]
    assert [method.get("tau") for method in methods] == [None, 1.0, 1.0, None, 2, 2]
    assert from_dict(methods[-1]).to_dict()["shrink"] is False
    assert {method["name"] for method in expand_methods(["all"], [16])} == set(list_methods("encoder"))
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
        ({"methods": ()}, "methods must have at least one value"),
        ({"seeds": (1, 1)}, "duplicate value in seeds: 1"),
        ({"corruptions": ("fog",)}, "corruption must be NAME:LEVEL .* got 'fog'"),
        ({"batch_size": 0}, "batch_size"),
        ({"scope": "page"}, "scope"),
        ({"methods": ({"name": "clust", "keep": 3},)}, "clust"),
        ({"methods": ({"keep": 3},)}, "a method must be a dict with its name"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_differences_say_what_changed() -> None:
    before, now = config().to_json(), config(limit=5, seeds=(0, 1)).to_json()
    assert differences(before, now) == ["limit: was null, now 5", "seeds: now with 1"]
    assert differences(before, before) == []


def test_every_ready_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clustrs.cli.base import parse
    from clustrs.cli.evaluate import configuration
    from clustrs.evaluation import levels

    def without_runs(texts: Sequence[str], *_: Any, **__: Any) -> dict[str, str]:
        return {text: f"{levels.parse_loss(text)[0]}:0.1" for text in texts}

    monkeypatch.setattr(levels, "resolve_losses", without_runs)
    ready = [Path(name) for name in sorted(shipped_configs())]
    assert len(ready) >= 8
    for name in ready:
        made = configuration(parse(["eval", "--config", str(name), "--output", str(tmp_path / name.name)]))
        assert made.methods
        assert made.corruptions


def test_a_configuration_file(tmp_path: Path) -> None:
    from clustrs.cli.base import parse
    from clustrs.cli.evaluate import configuration

    file = tmp_path / "mine.yaml"
    file.write_text("task: scenes\nmethods: [none, clustrs tau=2]\nkeep: [16, 0.5]\ncorrupt: gaussian\nbatch-size: 5\n")
    made = configuration(parse(["eval", "--config", str(file), "--limit", "3", "--keep", "8,9"]))
    assert (made.batch_size, made.limit, len(made.corruptions)) == (5, 3, 5)
    assert [method["keep"] for method in made.methods] == [1.0, 8, 9]
    for text, message in (
        ("- a", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("taks: scenes", "unknown option 'taks'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            configuration(parse(["eval", "--config", str(file)]))
    with pytest.raises(ValueError, match="ready ones are"):
        read_settings(Path("nothing"))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limit: three", r"limit is not valid, got 'three' \(expected `int \| null`, got `str`\)"),
        ("limit: 1.5", r"limit is not valid, got 1\.5 \(expected `int"),
        ("task: [scenes]", r"task is not valid, got .'scenes'. \(expected `str`"),
        ("task: 2001-01-01", "task is not valid, got datetime.date"),
        ("seeds: {a: 1}", "seeds is not valid"),
        ("seeds: [one]", "seeds is not valid"),
        ("methods: [3]", "methods is not valid"),
        ("methods: {name: clustrs}", "methods is not valid"),
        ("methods: [{keep: 3}]", "a method must be a dict with its name"),
        ("corrupt: [gaussian: 0.5]", "corrupt is not valid"),
        ("keep: [[16]]", "keep is not valid"),
        ("task-options: 3", r"task_options is not valid, got 3 \(expected `object`"),
        ("scope: page", "scope must be one of 'image', 'crop', 'video', 'frame', got 'page'"),
        ("batch-size: true", "batch_size is not valid, got True"),
        ("seeds: [" + "9" * 400 + "]", "seeds.*9999"),
        ("limit: " + "9" * 5000, "is not YAML"),
        ("task: 2001-99-99", "is not YAML"),
        ("a: &x [*x]", "line 1 has the alias ..: write the value out"),
        (BOMB, "line 2 has the alias ..: write the value out"),
        ("[" * 5000, "is not YAML: nested more than 20 deep"),
        ("1: 2", "must be a mapping"),
        ("methods: ['']", "methods must be values separated by spaces or commas, none of them empty"),
        ('a: "\\ud800"', "unknown option 'a'|is not YAML"),
    ],
    ids=lambda value: value[:24],
)
def test_wrong_configuration_files_are_one_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    code, out, err = run("eval", "--config", tmp_path / "mine.yaml", "--set-task", "a=1", "-o", tmp_path / "run")
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert err.startswith("clustrs: ")
    assert err.count("\n") == 1
    assert len(err) < 600
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": 3}, r"task is not valid, got 3 \(expected `str`, got `int`\)"),
        ({"limit": "3"}, r"limit is not valid, got '3' \(expected `int \| null`, got `str`\)"),
        ({"limit": 10**400}, r"limit is not valid, got 1000.*expected `int` <= "),
        ({"seeds": (2**63,)}, r"seeds is not valid, got .9223372036854775808.*expected `int` <= "),
        ({"seeds": ("0",)}, "seeds is not valid"),
        ({"methods": ("none",)}, "methods is not valid"),
        ({"task_options": [1]}, "task_options is not valid"),
        ({"crops": 1}, "crops must be one of 'all', 'base', got 1"),
        ({"positions": "compct"}, "did you mean 'compact'"),
    ],
)
def test_wrong_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_one_json_form(tmp_path: Path) -> None:
    """Lists and tuples are the same, paths are strings, and what JSON gives back is the same configuration."""
    one = config(methods=expand_methods(["clustrs"], [4]), data=tmp_path, seeds=[0, 1])
    assert one.seeds == (0, 1)
    assert one.data == str(tmp_path)
    assert Config.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.methods[0]["clip"] == [0.1, 0.95]
    assert set(one.to_json()) - set(one.decisive()) == {"batch_size"}


def test_differences_name_what_is_inside() -> None:
    before, now = {"model_files": {"a": "1", "b": "2"}}, {"model_files": {"a": "1", "b": "3"}}
    assert differences(before, now) == ['model_files/b: was "2", now "3"']
