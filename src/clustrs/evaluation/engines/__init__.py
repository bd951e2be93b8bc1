"""Where a run's work is done: in this process, or over a Ray cluster."""

from typing import Any

from clustrs import validation
from clustrs.evaluation.engines.base import Engine
from clustrs.options import EngineName

__all__ = ["ENGINES", "Engine", "get_engine"]

ENGINES: tuple[EngineName, ...] = ("local", "ray")


def get_engine(name: EngineName, **options: Any) -> Engine:
    """An engine by name; `options` are those of `RayEngine`, the local one has none."""
    validation.choice("engine", name, ENGINES)
    if name == "ray":
        from clustrs.evaluation.engines.ray import RayEngine

        return RayEngine(**options)
    from clustrs.evaluation.engines.local import LocalEngine

    return LocalEngine(**options)
