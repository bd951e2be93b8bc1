"""Which adapter opens which model: by `config.model_type`, extended by the entry points `clustrs.adapters`."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from clustrs import validation
from clustrs.models.adapters.base import Adapter
from clustrs.plugins import load_plugins

Kind = TypeVar("Kind", bound=type[Adapter])

_adapters: dict[str, type[Adapter]] = {}
WITHOUT_TOWER = ("gemma4_unified",)
"""Model types that read pixels without a vision tower, so that no attention scores their tokens."""


def register_adapter(adapter: Kind) -> Kind:
    """Class decorator: make an `Adapter` known for its `model_types`.

    The same module may register again (a notebook cell that is run twice); another module may not take a type over.
    """
    for model_type in adapter.model_types:
        known = _adapters.get(model_type)
        if known is not None and (known.__module__, known.__qualname__) != (adapter.__module__, adapter.__qualname__):
            raise ValueError(
                f"model type {model_type!r} has an adapter already: {known.__module__}.{known.__qualname__}"
            )
        _adapters[model_type] = adapter
    return adapter


@cache
def _load_all() -> None:
    """Import our own adapters, then those of installed packages."""
    package = import_module("clustrs.models.adapters")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    load_plugins("clustrs.adapters", lambda found: register_adapter(found) if isinstance(found, type) else None)


def list_model_types() -> list[str]:
    """The model types that can be opened."""
    _load_all()
    return sorted(_adapters)


def adapter_class(model_type: str) -> type[Adapter]:
    """The adapter of a model type; an error that names the known ones."""
    _load_all()
    if model_type in WITHOUT_TOWER and model_type not in _adapters:
        raise ValueError(
            f"a model of type {model_type!r} is not supported: it has no vision tower, hence no attention that scores "
            "its visual tokens; use select(...) with scores of your own"
        )
    if model_type not in _adapters:
        near = validation.nearest(model_type, _adapters)
        known = ", ".join(list_model_types())
        raise ValueError(
            f"a model of type {model_type!r} is not supported{near}: known are {known}; for others use select(...)"
        )
    return _adapters[model_type]


def get_adapter(model: Any) -> Adapter:
    """An adapter for a loaded model, with or without its language head."""
    inner = getattr(model, "model", model)
    config = getattr(model, "config", None)
    kind = adapter_class(getattr(config, "model_type", None) or type(model).__name__)
    return kind(inner)
