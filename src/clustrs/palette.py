"""One color and one marker for each method, in every figure, report and page.

The methods of the paper have fixed colors (Okabe and Ito's, which people with any color vision can tell apart). Every
other name gets a color that depends on the name alone and stays clear of the fixed ones. What is drawn beside methods
(parts of a time, budgets, variants) takes its colors from `SERIES`, so that a color has one meaning. Needs neither
torch nor matplotlib.
"""

from colorsys import hls_to_rgb
from hashlib import sha256

COLORS = {
    "clustrs": "#0072b2",
    "fastervlm": "#e69f00",
    "divprune": "#009e73",
    "visionzip": "#cc79a7",
    "vispruner": "#d55e00",
    "random": "#999999",
    "grid": "#56b4e9",
    "none": "#000000",
}
DARK = {"#0072b2": "#2a8fd6", "#000000": "#e5e7eb"}
"""Replacements for colors that are hard to see on a dark page."""
MARKERS = dict(zip(COLORS, "osv^D*Px", strict=True))
OTHER_MARKERS = "hp<>d8X"
SERIES = ("#332288", "#882255", "#999933", "#44aa99", "#ddcc77")
"""Colors for anything but methods: Tol's muted ones that differ clearly from the methods' own."""
CANDIDATES = 12


def color(name: str) -> str:
    """Return the color of a method as #rrggbb."""
    if name in COLORS:
        return COLORS[name]
    digest = sha256(name.encode()).digest()
    return max((_candidate(digest, i) for i in range(CANDIDATES)), key=_clearance)


def dark_css(scope: str = "") -> str:
    """Return the style rules of a page that is dark inside `scope`, for elements that have a color as their style's
    `color` or `--method`."""
    rules = [
        f'{scope} [style*="{key}: {light}"] {{ {key}: {dark} !important; }}'
        for light, dark in DARK.items()
        for key in ("color", "--method")
    ]
    return "\n".join(rules)


def marker(name: str) -> str:
    """Return the marker of a method, as matplotlib names it."""
    return MARKERS.get(name) or OTHER_MARKERS[sha256(name.encode()).digest()[-1] % len(OTHER_MARKERS)]


def _candidate(digest: bytes, index: int) -> str:
    hue, lightness = digest[2 * index] / 256, 0.3 + 0.3 * digest[2 * index + 1] / 256
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, lightness, 0.75))


def _clearance(candidate: str) -> int:
    """Return the squared distance to the nearest fixed color."""
    return min(sum((a - b) ** 2 for a, b in zip(_rgb(candidate), _rgb(c), strict=True)) for c in COLORS.values())


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)
