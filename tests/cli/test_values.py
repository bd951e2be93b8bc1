"""One grammar for lists, and bounds for numbers, on the whole command line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustrs.cli import main, options
from clustrs.cli.ask import compared
from clustrs.cli.base import parse
from clustrs.cli.evaluate import configuration
from clustrs.embedded import DEFAULT, EMBEDDED, EmbeddedModel, default_task
from clustrs.pruners import Pruner, variant_labels
from clustrs_paper import command as study

Run = Callable[..., tuple[int, str, str]]
LISTS = [
    (["--keep", "16", "50"], ["--methods", "none", "clustrs"]),
    (["--keep", "16,50"], ["--methods", "none,clustrs"]),
    (["--keep", "16, 50"], ["--methods", "none, clustrs"]),
]


def compare_words(*words: str) -> list[Pruner]:
    """The methods that `clustrs compare` compares with these words."""
    given = parse(["compare", "sample:scene-1", "Why?", *words])
    return compared(given.get("methods", ["all"]), given.get("keep"), given.get("settings"))


def labels(*words: str) -> list[str]:
    return variant_labels(compare_words(*words), with_keep=True)


@pytest.mark.parametrize(("keep", "methods"), LISTS)
def test_spaces_or_commas_everywhere(keep: list[str], methods: list[str]) -> None:
    pruners = compare_words(*methods, *keep)
    assert [(method.name, method.keep) for method in pruners] == [("none", 1.0), ("clustrs", 16), ("clustrs", 50)]
    evaluated = configuration(parse(["eval", *methods, *keep])).methods
    assert [(method["name"], method["keep"]) for method in evaluated] == [
        ("none", 1.0),
        ("clustrs", 16),
        ("clustrs", 50),
    ]
    config = study.make_config("overhead", study.parse(["overhead", *methods, *keep]))
    assert (config.methods, config.keep) == (("none", "clustrs"), (16, 50))
    config = study.make_config("ablation", study.parse(["ablation", *keep]))
    assert config.keep == (16, 50)


def test_commas_inside_a_parameter_stay() -> None:
    words = ["--methods", "clustrs clip=[0.2,0.9],none", "clustrs tau=2"]
    assert labels(*words) == [
        "clustrs clip=[0.2,0.9]",
        "none",
        "clustrs tau=2",
    ]
    words_of_a_switch = ["--methods", "clustrs", "clustrs representative=medoid"]
    assert labels(*words_of_a_switch) == [
        "clustrs",
        "clustrs representative=medoid",
    ]
    for word in ("clustrs,clustrs clip=0,0", "clustrs,clustrs clip=[0,0]"):
        assert labels("--methods", word) == ["clustrs", "clustrs clip=[0,0]"]
        clips = [method["clip"] for method in configuration(parse(["eval", "--methods", word, "--keep", "16"])).methods]
        assert clips == [[0.1, 0.95], [0.0, 0.0]]
    assert labels("--methods", "clustrs,clustrs-no-rrs") == ["clustrs", "clustrs-no-rrs"]
    evaluated = configuration(parse(["eval", *words])).methods
    assert [method["name"] for method in evaluated] == ["clustrs", "none", "clustrs"]
    assert options.split_methods(["clustrs clip=[1,[2,3]],none", "grid"]) == ["clustrs clip=[1,[2,3]]", "none", "grid"]


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", ""])
def test_empty_values(text: str) -> None:
    with pytest.raises(ValueError, match="none of them empty"):
        options.split([text])


def test_ask_takes_one_budget(run: Run) -> None:
    code, out, err = run("ask", "sample:scene-1", "Why?", "--keep", "16", "50")
    assert (code, out) == (2, "")
    assert err == "clustrs: --keep must be one budget for ask, got 16 50 (clustrs compare takes several)\n"


def test_settings_add_up() -> None:
    given = parse(["ask", "i.png", "Why?", "--set", "tau=2", "shrink=false", "--set", "centroid=huber"])
    assert given["settings"] == {"tau": 2, "shrink": False, "centroid": "huber"}
    assert parse(["ask", "i.png", "Why?"]) == {"image": "i.png", "question": "Why?"}


BIG = ["9" * 400, "9" * 6000, "-" + "9" * 400, "1e400", "٣"]
NUMERIC: list[tuple[list[str], list[str]]] = [
    (["ask", "sample:scene-1", "Why?"], ["--keep", "--seed", "--max-new-tokens"]),
    (["compare", "sample:scene-1", "Why?"], ["--keep", "--seed", "--max-new-tokens"]),
    (["eval"], ["--keep", "--seeds", "--limit", "--batch-size", "--max-new-tokens", "--workers"]),
    (["corrupt", "sample:scene-1", "--corrupt", "gaussian:1", "-o", "x.png"], ["--seed"]),
    (["judge", "run", "--judge-model", "m"], ["--judge-runs", "--concurrency"]),
    (["study", "stability"], ["--keep", "--count", "--top", "--levels", "--seed"]),
    (["study", "manifold"], ["--keep", "--count", "--levels", "--seed"]),
    (["study", "movement"], ["--keep", "--count", "--levels", "--seed"]),
    (["study", "denoising"], ["--keep", "--count", "--levels", "--seed"]),
    (["study", "overhead"], ["--keep", "--count", "--new-tokens", "--repeats"]),
    (["study", "ablation"], ["--keep", "--limit", "--seeds", "--batch-size", "--levels"]),
    (["study", "sensitivity"], ["--keep", "--limit", "--seeds", "--batch-size"]),
]


@pytest.mark.parametrize(("command", "options"), NUMERIC, ids=lambda value: " ".join(value[:2]))
def test_numbers_of_hundreds_of_digits(run: Run, command: list[str], options: list[str]) -> None:
    for option in options:
        for text in BIG:
            if (option, text) == ("--levels", "٣"):
                continue  # float() reads digits of any script
            code, out, err = run(*command, f"{option}={text}")
            assert (code, out) == (2, "")
            assert err.startswith(f"clustrs: {option} ")
            assert " must be a" in err
            assert err.count("\n") == 1
            assert len(err) < 400


@pytest.mark.parametrize("value", ["9" * 400, "9" * 6000, "[" * 3000, "1e999", "NaN"])
def test_parameters_of_hundreds_of_digits(run: Run, value: str) -> None:
    for words in (
        ["ask", "sample:scene-1", "Why?", "--set", f"tau={value}"],
        ["eval", "--methods", f"clustrs tau={value}"],
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith("clustrs: ")
        assert err.count("\n") == 1
        assert len(err) < 600


def test_numbers_of_other_kinds() -> None:
    keep, seed = options.read_keep, options.integer(0, options.LARGEST_SEED)
    assert (keep("16"), keep("0.25"), keep("1.0")) == (16, 0.25, 1.0)
    assert (seed("0"), seed(str(2**63 - 1))) == (0, 2**63 - 1)
    for read, text in ((seed, str(2**63)), (options.integer(), "1.0"), (study.number, "inf"), (keep, "inf")):
        with pytest.raises(ValueError, match="must be a"):
            read(text)


def test_a_configuration_file_has_the_same_lists(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("methods: none, clustrs\nkeep: 16,50\ncorrupt: clean,gaussian:1\nseeds: 3\n")
    config = configuration(parse(["eval", "--config", str(file)]))
    assert [(method["name"], method["keep"]) for method in config.methods] == [
        ("none", 1.0),
        ("clustrs", 16),
        ("clustrs", 50),
    ]
    assert (config.corruptions, config.seeds) == (("clean", "gaussian:1"), (3,))


def test_a_model_without_a_task_is_measured_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = configuration(parse(["eval", "--config", "demo"]))
    assert (demo.model, demo.task) == (DEFAULT, default_task(DEFAULT))
    for model in EMBEDDED:
        assert configuration(parse(["eval", "--model", model.name])).task == model.task
    photographer = EmbeddedModel("photographer", "llava", "photographs", "photos", "What is this?")
    monkeypatch.setattr("clustrs.embedded.EMBEDDED", (*EMBEDDED, photographer))
    assert configuration(parse(["eval", "--model", "photographer"])).task == "photos"
    assert configuration(parse(["eval", "--model", "photographer", "--task", "scenes"])).task == "scenes"
    assert configuration(parse(["eval", "--model", "org/model"])).task == default_task(DEFAULT)


def test_every_option_of_a_study_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for name in study.STUDIES:
        assert main(["study", name, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "study" in shown
        assert f"[default: {Path('out') / name}]" in shown
        assert f"(default: {DEFAULT}, or the one that knows the task)" in shown


def test_the_help_of_a_study_explains_only_options_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    for name in study.STUDIES:
        assert main(["study", name, "--help"]) == 0
        shown = capsys.readouterr().out
        own = set(re.findall(r"^ +(?:-o, )?(?:-h, )?(--[a-z0-9-]+)", shown, re.MULTILINE))
        assert set(re.findall(r"--[a-z][a-z0-9-]+", shown)) == own
        assert ("IMAGE" in shown) == ("Images come before" in shown)
        assert "images are given" not in shown or "IMAGE" in shown


def test_defaults_are_those_of_the_config() -> None:
    from clustrs_paper.studies.overhead import OverheadConfig

    assert study.make_config("overhead", study.parse(["overhead"])) == OverheadConfig()
    words: list[Any] = ["overhead", "a.png", "--crops", "base", "--quiet", "--repeats", "3"]
    expected = OverheadConfig(images=("a.png",), crops="base", progress=False, repeats=3)
    assert study.make_config("overhead", study.parse(words)) == expected
