"""Differences with intervals in the rows of a table: `NAME`, `NAME_low` and `NAME_high`."""

from collections.abc import Mapping
from typing import Any


def clear(row: Mapping[str, Any], name: str) -> int:
    """1 or -1 if the interval lies on that side of 0, else 0."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0


def signed(row: Mapping[str, Any], name: str) -> str:
    """A difference with its interval, and a star where that excludes 0."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value is None:
        return "-"
    interval = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{value:+.3f}{interval}{'*' * (clear(row, name) != 0)}"


def count_clear(rows: list[dict[str, Any]], name: str) -> str:
    """In how many cells a difference is beyond doubt, and how many to expect of none."""
    up, down = (sum(clear(row, name) == side for row in rows) for side in (1, -1))
    return (
        f"clearly better in {up} and clearly worse in {down} of {len(rows)} cells "
        f"(about {len(rows) / 20:.1f} would look clear if there were no difference at all)"
    )
