"""Writes `__init__.pyi`, which tells type checkers what `clustrs.pruners` exports."""

from pathlib import Path

from clustrs import pruners

STUB = Path(__file__).with_name("__init__.pyi")


def stub() -> str:
    """One import for each exported name, from the module that defines it."""
    modules: dict[str, list[str]] = {}
    for name in pruners.__all__:
        modules.setdefault(getattr(pruners, name).__module__, []).append(name)
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items())]
    exported = [f'    "{name}",' for name in sorted(pruners.__all__)]
    return "\n".join(["# Written by python -m clustrs.pruners", "", *lines, "", "__all__ = [", *exported, "]", ""])


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    print(f"written: {STUB}")
