"""Names, parameters, and the way through JSON."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import METHODS

import clustrs
from clustrs import ClustRS, NoPruning, Pruner, plugins
from clustrs.pruners import registry


def test_the_names() -> None:
    names = clustrs.list_methods()
    assert names == sorted(names)
    assert {"clustrs", "divprune", "fastervlm", "grid", "none", "random", "visionzip", "vispruner"} <= set(names)
    assert {name for name, _, _ in METHODS} | {"none"} == set(clustrs.list_methods("encoder")), (
        "a method is missing from the generic tests"
    )


def test_every_method_is_exported_and_has_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods" / "index.md").read_text()
    for name in clustrs.list_methods():
        cls = clustrs.method_class(name)
        assert getattr(clustrs, cls.__name__) is cls
        assert cls.__name__ in clustrs.__all__
        assert cls.label
        assert f"| `{name}` |" in page


@pytest.mark.parametrize(("name", "easy", "hard"), METHODS)
@pytest.mark.parametrize("keep", [1, 16, 1.0, 0.125])
def test_round_trip_through_json(name: str, easy: dict[str, Any], hard: dict[str, Any], keep: int | float) -> None:
    for parameters in (easy, hard):
        method = clustrs.get_method(name, keep=keep, **parameters)
        back = clustrs.from_dict(json.loads(json.dumps(method.to_dict())))
        assert back == method
        assert method.to_dict()["name"] == name
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
        (lambda: clustrs.from_dict({"keep": 3}), ["'name'"]),
        (lambda: clustrs.from_dict([1]), ["'name'"]),  # type: ignore[arg-type]
        (lambda: clustrs.from_dict({"method": "clustrs", "keep": 3}), ["'name'"]),
        (lambda: clustrs.from_dict({"name": "clustrs", "keep": 3, "method": 1}), ["'method'"]),
        (lambda: clustrs.parse_method("clusters tau=2"), ["'clusters'", "did you mean 'clustrs'?"]),
        (lambda: clustrs.parse_method(""), ["unknown method ''"]),
        (lambda: clustrs.parse_method("clustrs tau"), ["'clustrs tau'", "KEY=VALUE"]),
        (lambda: clustrs.get_method("denoise", keep=3, inner="visionzip"), ["got 'visionzip', which merges tokens"]),
        (lambda: clustrs.get_method("denoise", keep=3, inner=5), ["inner must be a method, its name", "got 5"]),
        (lambda: clustrs.get_method("denoise", inner="divprune"), ["keep is missing"]),
        (lambda: clustrs.get_method("denoise", keep=3, inner="clusters"), ["did you mean 'clustrs'?"]),
        (lambda: clustrs.Denoise(ClustRS(keep=3), clip=(1, 0)), ["clip must be two numbers", "got (1, 0)"]),
        (lambda: ClustRS(keep=0), ["got 0", "at least 1"]),
        (lambda: ClustRS(keep=1.5), ["got 1.5", "(0, 1]"]),
        (lambda: ClustRS(keep=0.0), ["keep must be", "got 0.0"]),
        (lambda: ClustRS(keep=-3), ["got -3"]),
        (lambda: ClustRS(keep=True), ["got True"]),
        (lambda: ClustRS(keep="16"), ["got '16'"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=float("nan")), ["got nan"]),
        (lambda: ClustRS(keep=3, tau=0), ["tau must be a number above 0, got 0"]),
        (lambda: ClustRS(keep=3, tau=float("inf")), ["tau must be a number above 0, got inf"]),
        (lambda: ClustRS(keep=3, iterations=0), ["iterations must be an integer of at least 1, got 0"]),
        (lambda: ClustRS(keep=3, iterations=2.0), ["iterations must be an integer of at least 1, got 2.0"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, tolerance=2), ["tolerance must be a number from 0 to 1, got 2"]),
        (
            lambda: ClustRS(keep=3, distance="hubert"),  # type: ignore[arg-type]
            ["distance must be one of 'huber', 'euclidean', got 'hubert' (did you mean 'huber'?)"],
        ),
        (lambda: ClustRS(keep=3, centroid="median"), ["centroid must be one of 'mean', 'huber', got 'median'"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, shrink=1), ["shrink must be one of True, False, got 1"]),  # type: ignore[arg-type]
        (
            lambda: ClustRS(keep=3, clip=(0.9, 0.1)),
            ["clip must be two numbers 0 <= a <= b <= 1, got (0.9, 0.1) (write clip=[0, 0.5])"],
        ),
        (
            lambda: ClustRS(keep=3, clip=0.5),  # type: ignore[arg-type]
            ["clip must be two numbers 0 <= a <= b <= 1, got 0.5 (write clip=[0, 0.5])"],
        ),
        (lambda: ClustRS(keep=3, salience="yes"), ["salience must be one of True, False, None, got 'yes'"]),  # type: ignore[arg-type]
        (lambda: ClustRS(keep=3, seed=-1), ["seed must be an integer of at least 0, got -1"]),
        (
            lambda: ClustRS(keep=3, representative="medoids"),  # type: ignore[arg-type]
            ["representative must be one of", "did you mean 'medoid'?"],
        ),
        (lambda: ClustRS(keep=3, attention_power=0), ["attention_power must be a number above 0, got 0"]),
        (lambda: ClustRS(keep=3, attention_power=float("inf")), ["attention_power must be a number above 0, got inf"]),
        (lambda: clustrs.VisPruner(keep=3, important=1.1), ["important must be a number from 0 to 1, got 1.1"]),
        (lambda: clustrs.Grid(keep=3, columns=0), ["columns must be an integer of at least 1, got 0"]),
        (lambda: clustrs.get_method("none", keep=16), ["keep must be 1.0", "keeps every token", "got 16"]),
    ],
)
def test_errors_say_what_to_do(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    for word in words:
        assert word in str(error.value)


def test_the_words_of_the_command_line() -> None:
    assert clustrs.parse_method("clustrs tau=2 shrink=false") == {"name": "clustrs", "tau": 2, "shrink": False}
    spec = clustrs.parse_method("denoise inner=divprune")
    assert clustrs.from_dict({**spec, "keep": 0.5}) == clustrs.Denoise(clustrs.DivPrune(keep=0.5))


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("none,clustrs", ["none", "clustrs"]),
        ("clustrs clip=0,0", ["clustrs clip=0,0"]),
        ("none,clustrs clip=0,0,divprune", ["none", "clustrs clip=0,0", "divprune"]),
        ("clustrs clip=0,0,clustrs-no-rrs", ["clustrs clip=0,0", "clustrs-no-rrs"]),
        ("clustrs clip=[0, 0.5],none", ["clustrs clip=[0, 0.5]", "none"]),
        ("clustrs clip=0,0.5 tau=2, none", ["clustrs clip=0,0.5 tau=2", "none"]),
        ("denoise inner=divprune,grid", ["denoise inner=divprune", "grid"]),
        ("clustrs tau=2,all", ["clustrs tau=2", "all"]),
        ("clustrs tau=2,clusters", ["clustrs tau=2", "clusters"]),
        ("none,fog", ["none", "fog"]),
        (
            'denoise inner={"name":"clustrs","clip":[0,0]},none',
            ['denoise inner={"name":"clustrs","clip":[0,0]}', "none"],
        ),
    ],
)
def test_a_list_of_methods_is_split_at_methods_only(text: str, specs: list[str]) -> None:
    assert clustrs.split_methods(text) == specs


@pytest.mark.parametrize("text", ["", "none,", ",none", "clustrs tau=2,", "none,,grid"])
def test_an_empty_method_in_a_list(text: str) -> None:
    with pytest.raises(ValueError, match="none of them empty"):
        clustrs.split_methods(text)


@pytest.mark.parametrize("spec", ["clustrs clip=0,0.5", "clustrs clip=[0,0.5]", "clustrs clip=0.0,5e-1"])
def test_numbers_with_commas_are_a_list(spec: str) -> None:
    assert clustrs.from_dict({**clustrs.parse_method(spec), "keep": 3}) == ClustRS(keep=3, clip=(0, 0.5))


def test_presets_have_names() -> None:
    presets = clustrs.list_presets()
    assert {"clustrs-no-rrs", "clustrs-clustering"} <= set(presets)
    assert not set(presets) & set(clustrs.list_methods())
    clustering = clustrs.get_method("clustrs-clustering", keep=9)
    assert clustering == ClustRS(keep=9, distance="euclidean", shrink=False)
    assert clustering.to_dict()["name"] == "clustrs"
    assert clustrs.from_dict(clustering.to_dict()) == clustering
    assert clustrs.method_class("clustrs-no-rrs") is ClustRS
    assert clustrs.parse_method("clustrs-clustering tau=2 shrink=true clip=0,1") == {
        "name": "clustrs",
        "distance": "euclidean",
        "shrink": True,
        "clip": [0, 1],
        "tau": 2,
    }
    with pytest.raises(ValueError, match=r"unknown method 'clustrs-no-rss' \(did you mean 'clustrs-no-rrs'\?\)"):
        clustrs.get_method("clustrs-no-rss", keep=9)


def test_variants_are_labelled_by_what_differs() -> None:
    def labels(*specs: str, **options: bool) -> list[str]:
        methods = [clustrs.from_dict({"keep": 16, **clustrs.parse_method(spec)}) for spec in specs]
        found = clustrs.variant_labels(methods, **options)
        assert found == clustrs.variant_labels([json.loads(json.dumps(one.to_dict())) for one in methods], **options)
        return found

    assert labels("clustrs", "clustrs clip=0,0", "grid") == ["clustrs", "clustrs clip=[0,0]", "grid"]
    assert labels("clustrs tau=2") == ["clustrs"]
    assert labels("clustrs tau=2 seed=1", "clustrs tau=2 seed=3") == ["clustrs seed=1", "clustrs seed=3"]
    assert labels("clustrs", "clustrs representative=medoid") == ["clustrs", "clustrs representative=medoid"]
    presets = ["clustrs", "clustrs-clustering", "clustrs-no-rrs"]
    assert labels(*presets) == presets
    assert labels("clustrs-clustering", "clustrs tau=2 shrink=false") == ["clustrs distance=euclidean", "clustrs tau=2"]
    assert labels("clustrs keep=16", "clustrs keep=0.5") == ["clustrs", "clustrs"]
    assert labels("clustrs keep=16", "clustrs keep=0.5", with_keep=True) == ["clustrs keep=16", "clustrs keep=0.5"]
    wrapped = labels("denoise", "denoise inner=divprune", 'denoise inner={"name":"clustrs","shrink":false}')
    assert wrapped == ["denoise", "denoise inner=divprune", 'denoise inner={"name":"clustrs","shrink":false}']
    for label in wrapped:
        assert clustrs.parse_method(label)["name"] == "denoise"
    unknown = [{"name": "gone", "keep": 3, "a": 1}, {"name": "gone", "keep": 3, "a": 2}]
    pairs = ("clustermeans+fastv", "clustermeans keep=4 + fastv", "clustermeans + fastv layer=1")
    composed = labels(*pairs)
    assert composed[1] == 'compose first={"name":"clustermeans","keep":4}'
    for one, other in zip(composed, pairs, strict=True):
        first, second = (clustrs.from_dict({"keep": 2, **clustrs.parse_method(spec)}) for spec in (one, other))
        assert first == second
    assert clustrs.variant_labels(unknown) == ["gone a=1", "gone a=2"]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    monkeypatch.setattr(plugins, "_loaded", set())


def make(module: str, name: str, label: str) -> type[Pruner]:
    return type("Mine", (Pruner,), {"name": name, "label": label, "__module__": module})


@pytest.mark.usefixtures("own_registry")
def test_the_same_module_may_register_a_name_again() -> None:
    for label in ("first", "second"):
        clustrs.register(make("notebook", "mine", label))
    assert clustrs.method_class("mine").label == "second"
    with pytest.raises(ValueError, match=r"'mine' is registered already: notebook\.Mine .* other\.Mine"):
        clustrs.register(make("other", "mine", "third"))
    with pytest.raises(ValueError, match=r"'clustrs' is registered already: clustrs\.pruners\.clustrs\.ClustRS"):
        clustrs.register(make("other", "clustrs", "third"))
    with pytest.raises(ValueError, match="expected a Pruner subclass with a `name`, got <class"):
        clustrs.register(type("Nameless", (Pruner,), {}))


@pytest.mark.usefixtures("own_registry")
def test_methods_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four installed packages: a module that registers, a class, one that fails, one that exits."""
    (tmp_path / "third_party_pruners.py").write_text(THIRD_PARTY)
    (tmp_path / "third_party_exit.py").write_text("import sys\nsys.exit(3)\n")
    for package, target in (
        ("with-module", "third_party_pruners"),
        ("with-class", "third_party_pruners:Last"),
        ("broken", "third_party_pruners:Missing"),
        ("leaving", "third_party_exit"),
    ):
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[clustrs.pruners]\n{package} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"a plugin is left out: entry point (broken|leaving)") as warned:
        names = clustrs.list_methods()
    assert len(warned) == 2
    assert {"first-k", "last-k", "clustrs"} <= set(names)
    tokens = torch.rand(10, 4)
    assert clustrs.get_method("first-k", keep=3).select(tokens).indices.tolist() == [0, 1, 2]
    assert clustrs.get_method("last-k", keep=3).select(tokens).indices.tolist() == [7, 8, 9]


THIRD_PARTY = """
from dataclasses import dataclass
import torch
import clustrs

@clustrs.register
@dataclass(frozen=True)
class First(clustrs.Pruner):
    name = "first-k"
    def _choose(self, inputs, k):
        return torch.arange(k).repeat(len(inputs.tokens), 1)

@dataclass(frozen=True)
class Last(clustrs.Pruner):
    name = "last-k"
    def _choose(self, inputs, k):
        return torch.arange(inputs.tokens.shape[1] - k, inputs.tokens.shape[1]).repeat(len(inputs.tokens), 1)
"""


def test_the_import_is_light() -> None:
    code = (
        "import sys, clustrs; print([m for m in ('transformers', 'matplotlib', 'gradio', 'ray') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
