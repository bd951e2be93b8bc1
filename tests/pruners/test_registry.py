"""Names, parameters, and the way through JSON."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from method_cases import METHODS

import clustrs
from clustrs import ClustRS, NoPruning, Pruner


def test_the_names() -> None:
    names = ["clustrs", "divprune", "fastervlm", "grid", "none", "random", "visionzip", "vispruner"]
    assert clustrs.list_methods() == names
    assert {name for name, _, _ in METHODS} | {"none"} == set(names), "a method is missing from the generic tests"


@pytest.mark.parametrize(("name", "easy", "hard"), METHODS)
@pytest.mark.parametrize("keep", [1, 16, 1.0, 0.125])
def test_round_trip_through_json(name: str, easy: dict[str, Any], hard: dict[str, Any], keep: int | float) -> None:
    for parameters in (easy, hard):
        method = clustrs.get_method(name, keep=keep, **parameters)
        back = clustrs.from_dict(json.loads(json.dumps(method.to_dict())))
        assert back == method
        assert hash(back) == hash(method)
        assert type(back.keep) is type(keep)


def test_keep_is_a_count_or_a_fraction() -> None:
    assert ClustRS(keep=16).count(576) == 16
    assert ClustRS(keep=1000).count(576) == 576
    assert ClustRS(keep=0.25).count(576) == 144
    assert ClustRS(keep=1.0).count(576) == 576
    assert ClustRS(keep=1).count(576) == 1
    assert ClustRS(keep=0.0001).count(576) == 1
    assert NoPruning().count(576) == 576


def test_methods_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ClustRS(keep=3).keep = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: clustrs.get_method("clusters", keep=3), ["'clusters'", "did you mean 'clustrs'?", "fastervlm"]),
        (lambda: clustrs.get_method("clustrs", keep=3, tua=1), ["'tua'", "did you mean 'tau'?", "iterations"]),
        (lambda: clustrs.get_method("clustrs"), ["keep is missing"]),
        (lambda: clustrs.from_dict({"keep": 3}), ["'method'"]),
        (lambda: clustrs.from_dict([1]), ["'method'"]),  # type: ignore[arg-type]
        (lambda: clustrs.from_dict({"method": "clustrs", "keep": 3, "name": 1}), ["'name'"]),
        (lambda: ClustRS(keep=0), ["keep=0", "at least 1"]),
        (lambda: ClustRS(keep=1.5), ["keep=1.5", "(0, 1]"]),
        (lambda: ClustRS(keep=0.0), ["keep=0.0"]),
        (lambda: ClustRS(keep=-3), ["keep=-3"]),
        (lambda: ClustRS(keep=True), ["keep=True"]),
        (lambda: ClustRS(keep="16"), ["keep='16'"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=float("nan")), ["keep=nan"]),
        (lambda: ClustRS(keep=3, tau=0), ["tau=0", "above 0"]),
        (lambda: ClustRS(keep=3, tau=float("inf")), ["tau=inf"]),
        (lambda: ClustRS(keep=3, iterations=0), ["iterations=0"]),
        (lambda: ClustRS(keep=3, iterations=2.0), ["iterations=2.0"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, tolerance=2), ["tolerance=2", "from 0 to 1"]),
        (lambda: ClustRS(keep=3, distance="hubert"), ["distance='hubert'", "did you mean 'huber'?", "'euclidean'"]),
        (lambda: ClustRS(keep=3, centroid="median"), ["centroid='median'", "'mean'"]),
        (lambda: ClustRS(keep=3, shrink=1), ["shrink=1", "True, False"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, clip=(0.9, 0.1)), ["clip=(0.9, 0.1)"]),
        (lambda: ClustRS(keep=3, clip=0.5), ["clip=0.5"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, salience="yes"), ["salience='yes'"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, seed=-1), ["seed=-1"]),
        (lambda: clustrs.VisPruner(keep=3, important=1.1), ["important=1.1"]),
        (lambda: clustrs.Grid(keep=3, columns=0), ["columns=0"]),
        (lambda: clustrs.get_method("none", keep=16), ["keep=16", "keeps every token"]),
    ],
)
def test_errors_say_what_to_do(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    for word in words:
        assert word in str(error.value)


def test_a_method_of_ones_own() -> None:
    class Mine(Pruner):
        name = "clustrs"

    with pytest.raises(ValueError, match="registered already"):
        clustrs.register(Mine)


def test_the_import_is_light() -> None:
    code = (
        "import sys, clustrs; print([m for m in ('transformers', 'matplotlib', 'gradio', 'ray') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
