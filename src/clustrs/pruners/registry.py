"""One name for each method, everywhere: in the API, the command line, the reports, the plugins."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from clustrs import validation
from clustrs.pruners.base import Pruner

Method = TypeVar("Method", bound=type[Pruner])

_methods: dict[str, type[Pruner]] = {}


def register(method: Method) -> Method:
    """Class decorator: make a `Pruner` known under its `name`."""
    if _methods.setdefault(method.name, method) is not method:
        raise ValueError(f"a method named {method.name!r} is registered already")
    return method


def list_methods() -> list[str]:
    """The names of all methods."""
    return sorted(_methods)


def method_class(name: str) -> type[Pruner]:
    """The class behind a name."""
    if name not in _methods:
        known = ", ".join(list_methods())
        raise ValueError(f"unknown method {name!r}{validation.nearest(name, _methods)}: give one of {known}")
    return _methods[name]


def get_method(name: str, /, **parameters: Any) -> Pruner:
    """A method by name, for example `get_method("clustrs", keep=16, tau=2.0)`."""
    method = method_class(name)
    known = [field.name for field in fields(method)]
    for parameter in parameters:
        if parameter not in known:
            near = validation.nearest(parameter, known)
            raise ValueError(f"{name} has no parameter {parameter!r}{near}: it has {', '.join(known)}")
    for field in fields(method):
        if field.default is MISSING and field.name not in parameters:
            raise ValueError(f"{field.name} is missing: give get_method({name!r}, {field.name}=...)")
    return method(**parameters)


def from_dict(data: dict[str, Any]) -> Pruner:
    """The method that `to_dict` described."""
    if not isinstance(data, dict) or not isinstance(data.get("method"), str):
        raise ValueError(f"{data!r} describes no method: give a dict with its name under 'method'")
    return get_method(data["method"], **{key: value for key, value in data.items() if key != "method"})
