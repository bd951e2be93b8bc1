"""Pruned models in lmms-eval: `lmms-eval --model clustrs --model_args pretrained=...,method=clustrs,keep=64`.

lmms-eval finds `manifest` by the entry point group `lmms_eval.models`. Only `model` needs lmms-eval.
"""

from typing import Any

MODEL = "clustrs"  # the name under which lmms-eval knows the model
# The classes of the model: for tasks in messages, and (with --force_simple) for those of the older form.
CLASSES = {"chat": f"{__name__}.model.ChatModel", "simple": f"{__name__}.model.SimpleModel"}


def manifest() -> Any:
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(MODEL, simple_class_path=CLASSES["simple"], chat_class_path=CLASSES["chat"])
