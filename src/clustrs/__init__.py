"""ClustRS: fewer visual tokens for vision-language models, without training.

Names are imported when they are first used, so that `import clustrs` and `clustrs --help` need no torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustrs.pruners import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        if find_spec(f"{__name__}.{name}") is not None:  # `from clustrs import palette` asks here first
            return import_module(f"{__name__}.{name}")
        pruners = import_module("clustrs.pruners")
        if name in pruners.__all__:
            return getattr(pruners, name)
    raise AttributeError(f"module 'clustrs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("clustrs.pruners").__all__})
