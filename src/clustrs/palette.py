"""One color and one marker for each method, in every figure, report and page; needs neither torch nor matplotlib.

Some methods have fixed colors: Okabe and Ito's, then those that stay farthest from them for color-blind readers, too.
That of every other name depends on the name alone.
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
MARKERS = dict(zip(COLORS, "osv^D*Px", strict=True))
COLORS |= {"clustermeans": "#882211", "tome": "#7766ff", "prumerge-plus": "#77bb66", "fastv": "#33bbcc"}
DARK = {"#0072b2": "#2a8fd6", "#000000": "#e5e7eb", "#882211": "#e0705c"}  # for what is hard to see on a dark page
OTHER_MARKERS = "hp<>d8X"
SERIES = ("#332288", "#882255", "#999933", "#44aa99", "#ddcc77")  # for anything but methods: Tol's muted colors
CANDIDATES = 12


def color(name: str) -> str:
    """Return the color of a method as #rrggbb."""
    if name in COLORS:
        return COLORS[name]
    digest = sha256(name.encode()).digest()
    candidates = []
    for hue, light in zip(digest[0 : 2 * CANDIDATES : 2], digest[1 : 2 * CANDIDATES : 2], strict=True):
        parts = hls_to_rgb(hue / 256, 0.3 + 0.3 * light / 256, 0.75)
        candidates.append("#" + "".join(f"{round(255 * part):02x}" for part in parts))
    return max(candidates, key=_clearance)


def _clearance(candidate: str) -> int:
    own, *fixed = (bytes.fromhex(text[1:]) for text in (candidate, *COLORS.values()))
    return min(sum((a - b) ** 2 for a, b in zip(own, one, strict=True)) for one in fixed)


def dark_css(scope: str = "") -> str:
    """Return the style rules of a page that is dark inside `scope`, for elements with a color in their style."""
    return "\n".join(
        f'{scope} [style*="{key}: {light}"] {{ {key}: {dark} !important; }}'
        for light, dark in DARK.items()
        for key in ("color", "--method")
    )


def marker(name: str) -> str:
    """Return the marker of a method, as matplotlib names it."""
    return MARKERS.get(name) or OTHER_MARKERS[sha256(name.encode()).digest()[-1] % len(OTHER_MARKERS)]
