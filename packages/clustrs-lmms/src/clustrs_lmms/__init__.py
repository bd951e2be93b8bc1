"""Pruned models in lmms-eval: `lmms-eval --model clustrs --model_args pretrained=...,method=clustrs,keep=64`.

lmms-eval finds `manifest` by the entry point group `lmms_eval.models`, `clustrs report` finds `results` by
`clustrs.importers`. Only `model` needs lmms-eval.
"""

from importlib import metadata
from typing import Any

from clustrs.plugins import load_entry

__version__ = "0.2.0"
MODEL = "clustrs"  # the name under which lmms-eval knows the model
GROUP = "lmms_eval.models"
# The classes of the model: for tasks in messages, and (with --force_simple) for those of the older form.
CLASSES = {"chat": f"{__name__}.model.ChatModel", "simple": f"{__name__}.model.SimpleModel"}


def manifest() -> Any:
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL, simple_class_path=CLASSES["simple"], chat_class_path=CLASSES["chat"])


def check() -> str:
    """Check for `clustrs doctor` that lmms-eval knows the model, and return how it is called.

    When an entry point fails, lmms-eval only warns, and leaves out others.
    """
    from lmms_eval import models

    if MODEL not in models.list_available_models():
        for entry in metadata.entry_points(group=GROUP):
            try:
                load_entry(entry)
            except ValueError as error:
                raise RuntimeError(f"{error}; remove that package") from None
        raise RuntimeError(f"clustrs-lmms was installed without its entry point in {GROUP}: install it again")
    for simple in (False, True):
        models.get_model(MODEL, force_simple=simple)
    return f"lmms-eval --model {MODEL}"
