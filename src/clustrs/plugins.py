"""Entry points of other packages, looked up once: reading the metadata of all installed packages takes a while."""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points


def plugin_entries(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group; looked up again only when the import path has changed."""
    return _entries(group, tuple(sys.path))


@cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
