"""One name for each method, everywhere: in the API, the command line, the reports, the plugins.

A package adds methods by an entry point in the group `clustrs.pruners`: it names a module that registers some, or a
class. Entry points are loaded when methods are first asked for by name.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from clustrs import validation
from clustrs.plugins import load_plugins
from clustrs.pruners.base import Pruner

Method = TypeVar("Method", bound=type[Pruner])
GROUP = "clustrs.pruners"

_methods: dict[str, type[Pruner]] = {}


def register(method: Method) -> Method:
    """Class decorator: make a `Pruner` known under its `name`.

    The same module may register a name again, as a notebook cell that runs twice does; the later class replaces the
    earlier one.
    """
    name = getattr(method, "name", None)
    if not (isinstance(method, type) and issubclass(method, Pruner) and isinstance(name, str) and name.strip()):
        raise ValueError(f"{method!r} is no method: give a subclass of Pruner with a name, for example name = 'mine'")
    before = _methods.get(name)
    if before is not None and before.__module__ != method.__module__:
        raise ValueError(
            f"a method named {name!r} is registered already: {before.__module__}.{before.__qualname__} has the name, "
            f"{method.__module__}.{method.__qualname__} needs another"
        )
    _methods[name] = method
    return method


def registered_methods() -> dict[str, type[Pruner]]:
    """All methods by name, those of other packages included."""
    load_plugins(GROUP, lambda found: register(found) if isinstance(found, type) else None)
    return dict(sorted(_methods.items()))


def list_methods() -> list[str]:
    """The names of all methods."""
    return list(registered_methods())


def method_class(name: str) -> type[Pruner]:
    """The class behind a name."""
    known = registered_methods()
    if name not in known:
        raise ValueError(f"unknown method {name!r}{validation.nearest(name, known)}: give one of {', '.join(known)}")
    return known[name]


def get_method(name: str, /, **parameters: Any) -> Pruner:
    """A method by name, for example `get_method("clustrs", keep=16, tau=2.0)`."""
    method = method_class(name)
    known = [field.name for field in fields(method)]
    for parameter in parameters:
        if parameter not in known:
            near = validation.nearest(parameter, known)
            raise ValueError(f"{name} has no parameter {parameter!r}{near}: it has {', '.join(known)}")
    for field in fields(method):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in parameters:
            raise ValueError(f"{field.name} is missing: give get_method({name!r}, {field.name}=...)")
    return method(**parameters)


def from_dict(data: Mapping[str, Any]) -> Pruner:
    """The method that `to_dict` described."""
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise ValueError(f"{data!r} describes no method: give a dict with its name under 'name'")
    return get_method(data["name"], **{key: value for key, value in data.items() if key != "name"})


def parse_method(spec: str) -> dict[str, Any]:
    """What the command line says about a method, as `from_dict` takes it: a name, then parameters as KEY=VALUE.

    Values are JSON or words: "clustrs tau=2 shrink=false", "denoise inner=divprune".
    """
    name, *settings = spec.split() or [""]
    method_class(name)
    complaint = f"method {spec!r}: after the name give KEY=VALUE, for example tau=2"
    return {"name": name, **dict(validation.key_value(setting, complaint) for setting in settings)}
