"""The drawing of the imports between rooms, and the order that it shows."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import grimp
import pytest

import clustrs
from tools import import_graph
from tools.import_graph import Contract, Import, find_imports, find_rooms, upward_imports

CONTRACT = Contract(("low", "middle", "high"), frozenset({("house.low.a", "house.high.a")}))


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("clustrs", cache_dir=None)


def made_of(*imports: tuple[str, str]) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    graph.add_module("house")
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    return graph


def test_finds_the_rooms_of_the_package(graph: grimp.ImportGraph) -> None:
    folder = Path(clustrs.__file__).parent
    expected = {path.parent.name for path in folder.glob("*/__init__.py")}
    expected |= {path.stem for path in folder.glob("[!_]*.py")}
    assert find_rooms(graph) == expected
    assert {"ops", "pruners", "models", "evaluation", "cli", "validation"} <= expected
    assert expected <= set(import_graph.read_contract().rooms)


def test_finds_imports_that_are_there(graph: grimp.ImportGraph) -> None:
    imports = find_imports(graph, import_graph.read_contract())
    assert Import("pruners", "ops") in imports
    assert Import("pruners", "models", exempt=True) in imports
    assert not any(edge.importer == "ops" and edge.imported != "validation" for edge in imports)


def test_no_room_imports_upward(graph: grimp.ImportGraph) -> None:
    contract = import_graph.read_contract()
    assert upward_imports(find_imports(graph, contract), contract) == []


def test_contract_lists_rooms_from_the_lowest(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[[tool.importlinter.contracts]]\nid = "other"\n[[tool.importlinter.contracts]]\nid = "rooms"\n'
        'layers = ["high", "(middle)", "low | (lower)"]\nignore_imports = ["house.low.a -> house.high.a"]\n'
    )
    contract = import_graph.read_contract(pyproject)
    assert contract == Contract(("low", "lower", "middle", "high"), CONTRACT.exempt)


def test_upward_imports_are_found() -> None:
    graph = made_of(
        ("house.high.a", "house.low.a"), ("house.low.b", "house.middle"), ("house.middle.a", "house.middle")
    )
    imports = find_imports(graph, CONTRACT)
    assert imports == {Import("high", "low"), Import("low", "middle")}
    assert upward_imports(imports, CONTRACT) == [Import("low", "middle")]


def test_an_exemption_is_for_one_import_only() -> None:
    exempt = made_of(("house.low.a", "house.high.a"))
    assert upward_imports(find_imports(exempt, CONTRACT), CONTRACT) == []
    another = made_of(("house.low.a", "house.high.a"), ("house.low.b", "house.high.a"))
    assert upward_imports(find_imports(another, CONTRACT), CONTRACT) == [Import("low", "high")]


def test_unlisted_rooms_may_not_be_imported() -> None:
    imports = find_imports(made_of(("house.low.a", "house.cellar")), CONTRACT)
    assert upward_imports(imports, CONTRACT) == [Import("low", "cellar")]


def test_drawing_has_a_box_per_room_and_an_arrow_per_import() -> None:
    imports = {Import("high", "low"), Import("low", "high", exempt=True), Import("low", "middle")}
    drawing = ElementTree.fromstring(import_graph.draw(["low", "middle", "high"], imports))
    svg = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in drawing.iter(f"{svg}text")][:3] == ["low", "middle", "high"]
    arrows = {str(group.findtext(f"{svg}title")): group.find(f"{svg}path") for group in drawing.iter(f"{svg}g")}
    strokes = {title: path.get("stroke") for title, path in arrows.items() if path is not None}
    assert strokes == {
        "high imports low": import_graph.PLAIN,
        "low imports high": import_graph.LAZY,
        "low imports middle": import_graph.UPWARD,
    }


def test_the_drawing_in_the_docs_is_current() -> None:
    """If this fails: `make graph`."""
    assert import_graph.DRAWING.read_text(encoding="utf-8") == import_graph.current_drawing()
