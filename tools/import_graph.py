"""Draw which rooms of the package import from which, as an SVG: `make graph`.

The order of the rooms and the one permitted exception are those of the import-linter contract in pyproject.toml, so
the drawing and `make lint` cannot disagree.
"""

import argparse
import re
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
DRAWING = ROOT / "docs" / "images" / "import-graph.svg"

BOX_WIDTH, BOX_HEIGHT = 96, 32
COLUMN, ROW = 108, 52
MARGIN, LEGEND = 24, 44
PLAIN, LAZY, UPWARD = "#4b5563", "#2563eb", "#dc2626"


@dataclass(frozen=True)
class Contract:
    """The rooms, lowest first, and the imports between modules that are exempt from their order."""

    rooms: tuple[str, ...]
    exempt: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Import:
    """An import of one room (`importer`) from another (`imported`); exempt if every such import is."""

    importer: str
    imported: str
    exempt: bool = False


def read_contract(pyproject: Path = ROOT / "pyproject.toml") -> Contract:
    """Read the contract with the id "rooms"."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    contract = next(contract for contract in contracts if contract["id"] == "rooms")
    rooms = [room for layer in reversed(contract["layers"]) for room in re.findall(r"\w+", layer)]
    exempt = (line.split(" -> ") for line in contract.get("ignore_imports", []))
    return Contract(tuple(rooms), frozenset((importer, imported) for importer, imported in exempt))


def room_of(module: str) -> str | None:
    """Return the room that a module belongs to, None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def find_rooms(graph: grimp.ImportGraph) -> set[str]:
    """Return the rooms that exist, listed in the contract or not."""
    return {room for module in graph.modules if (room := room_of(module)) is not None}


def find_imports(graph: grimp.ImportGraph, contract: Contract) -> set[Import]:
    """Return the imports from room to room."""
    exempt: dict[tuple[str, str], bool] = {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            rooms = room_of(importer), room_of(imported)
            if rooms[0] is not None and rooms[1] is not None and rooms[0] != rooms[1]:
                pair = (rooms[0], rooms[1])
                exempt[pair] = exempt.get(pair, True) and (importer, imported) in contract.exempt
    return {Import(*pair, flag) for pair, flag in exempt.items()}


def upward_imports(imports: set[Import], contract: Contract) -> list[Import]:
    """Return the imports that break the order of the rooms."""
    level = {room: index for index, room in enumerate(contract.rooms)}
    unlisted = len(level)
    broken = [
        edge
        for edge in imports
        if not edge.exempt and level.get(edge.imported, unlisted) >= level.get(edge.importer, -1)
    ]
    return sorted(broken, key=lambda edge: (edge.importer, edge.imported))


def draw(rooms: list[str], imports: set[Import]) -> str:
    """Draw a staircase of rooms, lowest at the top; an import runs along its importer's column into the imported room.

    Imports in the right order leave a box at the top and enter the other one from the right. Those against the order
    (exempt: blue and dashed, otherwise red) leave it at the bottom and enter from the left.
    """
    level = {room: index for index, room in enumerate(rooms)}
    width = 2 * MARGIN + (len(rooms) - 1) * COLUMN + BOX_WIDTH
    height = 2 * MARGIN + (len(rooms) - 1) * ROW + BOX_HEIGHT + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="15">',
        "<title>Which rooms of clustrs import from which</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for edge in sorted(imports, key=lambda edge: (level[edge.importer], level[edge.imported])):
        parts += _arrow(edge, level[edge.importer], level[edge.imported])
    for room, index in level.items():
        parts += _box(room, index)
    legend = "Follow a line up from a room, and left at a dot, to a room it imports from. Dashed: imported when called."
    parts += [f'<text x="{MARGIN}" y="{height - MARGIN}" fill="{PLAIN}">{escape(legend)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _corner(index: int) -> tuple[int, int]:
    return MARGIN + index * COLUMN, MARGIN + index * ROW


def _box(room: str, index: int) -> list[str]:
    x, y = _corner(index)
    return [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#eef2ff" stroke="#1e293b"/>',
        f'<text x="{x + BOX_WIDTH // 2}" y="{y + BOX_HEIGHT // 2 + 5}" text-anchor="middle">{escape(room)}</text>',
    ]


def _arrow(edge: Import, importer: int, imported: int) -> list[str]:
    (x, y), (left, top) = _corner(importer), _corner(imported)
    column, row = x + BOX_WIDTH // 2, top + BOX_HEIGHT // 2
    if imported < importer:
        start, tip, back, color = y, left + BOX_WIDTH, 8, PLAIN
    else:
        start, tip, back, color = y + BOX_HEIGHT, left, -8, LAZY if edge.exempt else UPWARD
    dashes = ' stroke-dasharray="5 4"' if edge.exempt else ""
    return [
        f"<g><title>{escape(edge.importer)} imports {escape(edge.imported)}</title>",
        f'<path d="M{column} {start}V{row}H{tip + back}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>',
        f'<path d="M{tip} {row}l{back} -5v10z" fill="{color}"/>',
        f'<circle cx="{column}" cy="{row}" r="4" fill="{color}"/></g>',
    ]


def current_drawing() -> str:
    """Draw the package as it is now."""
    contract = read_contract()
    graph = grimp.build_graph("clustrs", cache_dir=None)
    found = find_rooms(graph)
    if unlisted := sorted(found - set(contract.rooms)):
        raise SystemExit(f"rooms not listed in the contract of pyproject.toml: {', '.join(unlisted)}")
    return draw([room for room in contract.rooms if room in found], find_imports(graph, contract))


def main() -> None:
    """Write the drawing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=DRAWING, help="the SVG file (default: %(default)s)")
    output: Path = parser.parse_args().output
    output.write_text(current_drawing(), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
