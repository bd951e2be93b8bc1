"""The methods, one file each, and the registry that names them.

Every module of this package is imported, and every method that one of them registers can be imported from here.
`__init__.pyi` tells type checkers and editors the same; `python -m clustrs.pruners` writes it.
"""

from importlib import import_module
from pkgutil import iter_modules

from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import _methods, from_dict, get_method, list_methods, method_class, parse_method, register
from clustrs.pruners.selection import EncoderStates, Layout, PrunerInputs, Selection

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")

_exports = {cls.__name__: cls for cls in _methods.values() if cls.__module__.startswith(f"{__name__}.")}
globals().update(_exports)

__all__ = [
    "EncoderStates",
    "Layout",
    "Pruner",
    "PrunerInputs",
    "Selection",
    "from_dict",
    "get_method",
    "list_methods",
    "method_class",
    "parse_method",
    "register",
    *sorted(_exports),
]
