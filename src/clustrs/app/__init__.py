"""The local web page: try methods on an image, look into their clusters, read runs. Needs the extra `app` (Gradio)."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from clustrs.plugins import install_hint

if TYPE_CHECKING:
    from clustrs.app.server import launch

__all__ = ["launch"]
MISSING = f"the page needs Gradio, which is not installed: {install_hint('app')}"


def __getattr__(name: str) -> Any:
    if name == "launch":
        if find_spec("gradio") is None:
            raise ModuleNotFoundError(MISSING, name="gradio")
        return import_module("clustrs.app.server").launch
    raise AttributeError(f"module 'clustrs.app' has no attribute {name!r}")
