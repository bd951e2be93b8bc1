"""Studies from Python: configs that check themselves, and results with rows, figures, findings and files."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from clustrs_paper import command
from clustrs_paper.command import STUDIES, config_class
from clustrs_paper.studies import StudyResult, manifold, movement, stability
from clustrs_paper.studies.ablation import AblationConfig
from clustrs_paper.studies.overhead import OverheadConfig
from clustrs_paper.studies.sensitivity import SensitivityConfig

Folders = Callable[[str, str], Path]


def test_a_study_is_a_call(folder_of: Folders, images: list[Path], tmp_path: Path) -> None:
    config = stability.StabilityConfig(
        model=str(folder_of("llava", "clip")),
        images=[str(path) for path in images[:2]],  # type: ignore[arg-type]
        methods=("clustrs", "clustrs tau=2"),
        keep=4,
        levels=(1.0,),
        progress=False,
    )
    assert config.images == tuple(map(str, images[:2]))
    result = stability.run(config)
    assert isinstance(result, StudyResult)
    assert {row["method"] for row in result.rows} == {"ranking", "clustrs", "clustrs tau=2"}
    assert list(result.figures) == ["stability"]
    assert "Positions kept again at gaussian:1" in result.findings
    assert [path.name for path in result.save(tmp_path)] == ["stability.png", "stability.svg", "stability.csv"]


def test_a_part_for_each_image(folder_of: Folders, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    config = movement.MovementConfig(model=str(folder_of("llava", "clip")), images=tuple(map(str, images[:2])), keep=5)
    result = movement.run(config)
    assert [part.name for part in result.parts] == ["movement-0", "movement-1"]
    assert len(result.rows) == 10
    assert result.findings == "\n".join(part.findings for part in result.parts)
    assert "movement: 100%" in capsys.readouterr().err
    movement.run(dataclasses.replace(config, progress=False))
    assert "movement:" not in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_options_are_the_fields_of_the_config(name: str) -> None:
    """Every field can be set on the command line, and a default in the help is that of the config."""
    config = config_class(name)
    assert config.__dataclass_params__.frozen
    named = {"quiet": "progress", "no_umap": "umap"}
    parameters = inspect.signature(getattr(command, name)).parameters
    options = {named.get(key, key): one.default for key, one in parameters.items() if key not in ("ctx", "output")}
    known = {field.name: field.default for field in dataclasses.fields(config) if field.name != "folder"}
    assert set(options) == set(known)
    switches = {key for key in options if key in named.values()}
    shown = {key for key, default in options.items() if default is not None} - switches
    assert {key: options[key] for key in shown} == {key: known[key] for key in shown}
    assert all(options[key] is False and known[key] is True for key in switches)
    unshown = set(options) - shown - switches
    assert all(isinstance(known[key], tuple | None | type(dataclasses.MISSING)) for key in unshown)


@pytest.mark.parametrize("name", STUDIES)
def test_defaults_in_help_texts_are_those_of_the_config(name: str) -> None:
    """Lists have their defaults in words."""
    (found,) = (one for one in typer.main.get_group(command.group).commands.values() if one.name == name)
    known = {field.name: field.default for field in dataclasses.fields(config_class(name))}
    for option in found.params:
        default = known.get(str(option.name))
        if isinstance(default, tuple) and default and option.name not in ("parameters",):
            words = " ".join(str(value) for value in default)
            assert f"(default: {words})" in str(getattr(option, "help", ""))


def test_one_value_will_do_where_there_may_be_several() -> None:
    config = OverheadConfig(methods="clustrs", keep=16, new_tokens=[3, 4])  # type: ignore[arg-type]
    assert (config.methods, config.keep, config.new_tokens) == (("clustrs",), (16,), (3, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stability.StabilityConfig(count=0), "count must be an integer of at least 1, got 0"),
        (lambda: stability.StabilityConfig(keep=1.5), r"keep must be a count .* or a fraction .*, got 1.5"),
        (
            lambda: stability.StabilityConfig(seed=2**63),
            "seed must be an integer of at most .*, got 92233720",
        ),
        (lambda: stability.StabilityConfig(seed=10**400), "seed must be an integer of at least 0, got 1000+"),
        (lambda: stability.StabilityConfig(methods=()), r"methods must have at least one value, got \(\)"),
        (lambda: stability.StabilityConfig(methods=("grid", "grid")), "duplicate value in methods: grid"),
        (lambda: stability.StabilityConfig(levels=("x",)), "levels must be a number, got 'x'"),  # type: ignore[arg-type]
        (lambda: stability.StabilityConfig(corruption=3), "corruption must be a string, got 3"),  # type: ignore[arg-type]
        (lambda: manifold.ManifoldConfig(umap=1), "umap must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: manifold.ManifoldConfig(seed=2**32), "seed must be an integer of at most 4294967295, got 4294967296"),
        (lambda: movement.MovementConfig(levels=(1.0,)), r"corruption must be given with levels"),
        (lambda: OverheadConfig(crops="bas"), "crops must be one of 'all', 'base', got 'bas'"),  # type: ignore[arg-type]
        (lambda: AblationConfig(folder=Path("x"), keep=(4, 4)), "duplicate value in keep: 4"),
        (
            lambda: SensitivityConfig(folder=Path("x"), parameters=("tauu",)),  # type: ignore[arg-type]
            "parameters must be .* got 'tauu' .did you mean 'tau'",
        ),
    ],
)
def test_a_config_checks_itself(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_studies_know_no_command_line() -> None:
    modules = ", ".join(f"clustrs_paper.studies.{name}" for name in STUDIES)
    code = f"import sys, {modules}; print('clustrs.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    for path in (Path(stability.__file__).parent).glob("*.py"):
        assert "argparse" not in path.read_text(encoding="utf-8")
