"""Pruned models in lmms-eval: `lmms-eval --model clustrs --model_args pretrained=...,method=clustrs,keep=64`.

`manifest` is what lmms-eval finds by the entry point group `lmms_eval.models`. `arguments` reads the model_args,
`engine` turns documents of a task into prompts and answers them; only `model` needs lmms-eval. `results` reads what
lmms-eval wrote, for `clustrs report`.
"""

from typing import Any

MODEL = "clustrs"
"""The name under which lmms-eval knows the model."""
CLASSES = {"chat": f"{__name__}.model.ChatModel", "simple": f"{__name__}.model.SimpleModel"}
"""The classes of the model: for tasks in messages, and (with --force_simple) for those of the older form."""


def manifest() -> Any:
    """Tell lmms-eval where the model is."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL, simple_class_path=CLASSES["simple"], chat_class_path=CLASSES["chat"])
