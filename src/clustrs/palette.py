"""One color and one marker per method, the same in every figure, report and page.

The colors are Okabe and Ito's, which color-blind readers can tell apart. A method that is not listed gets a color of
its own, which depends on nothing but its name.
"""

import colorsys
import zlib

OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
COLORS = {
    "none": "#000000",
    "clustrs": "#d55e00",
    "fastervlm": "#0072b2",
    "divprune": "#009e73",
    "visionzip": "#cc79a7",
    "vispruner": "#e69f00",
    "random": "#56b4e9",
    "grid": "#999999",
}
MARKERS = {
    "none": "s",
    "clustrs": "o",
    "fastervlm": "^",
    "divprune": "D",
    "visionzip": "v",
    "vispruner": "P",
    "random": "X",
    "grid": "*",
}
OTHER_MARKERS = "h<>pdH8"


def color(name: str) -> str:
    """The color of a method as #rrggbb."""
    if name in COLORS:
        return COLORS[name]
    red, green, blue = colorsys.hls_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.38, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def marker(name: str) -> str:
    """The marker of a method, by matplotlib's names."""
    return MARKERS.get(name, OTHER_MARKERS[zlib.crc32(name.encode()) % len(OTHER_MARKERS)])
