"""Plugins of other packages, by entry points (docs/extending.md), and the commands that install what is missing.

Loading an entry point runs code of its package, which may do anything. A plugin that fails or calls `sys.exit` is
named in one line; everything else goes on without it. Nothing here needs torch.
"""

import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

LONGEST_REASON = 200  # characters of a plugin's error that are shown
EXTRAS = {
    **dict.fromkeys(("typer", "rich", "tqdm", "yaml", "msgspec", "filelock", "openai", "jinja2"), "cli"),
    **dict.fromkeys(("transformers", "PIL"), "models"),
    "matplotlib": "plot",
    "ray": "ray",
    "gradio": "app",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "onnx"),
}
"""The extra of the package that installs an optional module."""
WITHOUT_MODELS = ("plot", "openvino")  # extras that do not need the package clustrs-models
# packages that extras need
NEEDED = {"studies": ["clustrs-paper"], "ray": ["clustrs-ray"], "lmms-eval": ["clustrs-lmms"]}
NEEDED["dev"] = NEEDED["ray"] + NEEDED["studies"]

_loaded: set[tuple[str, str, str]] = set()


class PluginWarning(RuntimeWarning):
    """Warning that a plugin is left out."""


def plugin_entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group; the metadata is read again only when the import path has changed."""
    return _entries(group, tuple(sys.path))


@cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def load_entry(entry: EntryPoint, use: Callable[[Any], object] | None = None) -> Any:
    """Load an entry point, call `use` with its value (to register it), and return the value. Whatever goes wrong,
    `sys.exit` included, is a ValueError of one line that names the plugin."""
    try:
        value = entry.load()
        if use is not None:
            use(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # code of another package raises what it likes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
        raise ValueError(f"{describe(entry)} failed ({reason})") from error
    return value


def load_plugins(group: str, use: Callable[[Any], object] | None = None) -> None:
    """Load the entry points of a group, once each; one that fails is left out with a `PluginWarning`."""
    for entry in plugin_entries(group):
        key = (group, entry.name, entry.value)
        if key not in _loaded:
            _loaded.add(key)
            try:
                load_entry(entry, use)
            except ValueError as error:
                leave_out(str(error))


def leave_out(reason: str) -> None:
    warnings.warn(f"a plugin is left out: {reason}", PluginWarning, stacklevel=3)


def load_needed(group: str, package: str, extra: str) -> Any:
    """Load the plugin that one of our packages adds to a group; without the package, say how to install it."""
    entries = [entry for entry in plugin_entries(group) if entry.dist and entry.dist.name == package]
    if not entries:
        raise ValueError(f"this needs the package {package}: {install_hint(extra, package=package)}")
    return load_entry(entries[0])


def describe(entry: EntryPoint) -> str:
    """Return the name of an entry point and of the package that it comes from."""
    package = entry.dist.name if entry.dist else "an unknown package"
    return f"entry point {entry.name} = {entry.value} of {package} in {entry.group}"


def install_command(*extras: str, package: str = "") -> str:
    """Return the pip command, for a clone of the repository, that installs extras and a package of `packages/`.

    >>> install_command("app")
    "pip install './packages/clustrs-models' '.[app]'"
    >>> install_command("cli", package="clustrs-paper")
    "pip install './packages/clustrs-models' '.[cli]' './packages/clustrs-paper'"
    """
    words = [] if extras and set(extras) <= set(WITHOUT_MODELS) else ["./packages/clustrs-models"]
    words.append(f".[{','.join(extras)}]")
    packages = {package, *(name for extra in extras for name in NEEDED.get(extra, []))} - {""}
    words += [f"./packages/{name}" for name in sorted(packages)]  # after clustrs: pip before 24 asks an index otherwise
    return " ".join(["pip install", *(f"'{word}'" for word in words)])


def install_hint(*extras: str, package: str = "") -> str:
    """Return `install_command` and where to run it; error messages end with this."""
    return f"{install_command(*extras, package=package)} (in a clone of ClustRS)"
