"""What the key `clustrs` of a model's config says, and whether it can be served. Nothing here needs vLLM.

The key comes with `--hf-overrides '{"clustrs": {"method": "clustrs", "keep": 64, "tau": 2}}'` or stands in config.json.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clustrs import validation
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import get_method

KEY = "clustrs"
DEFAULT_METHOD = "clustrs"
PREFIX = "Clustrs"
"""Before the name of vLLM's architecture in that of the pruned one."""
ARCHITECTURES = {
    "LlavaForConditionalGeneration": "clustrs.serving.llava:PrunedLlava",
    "LlavaOnevisionForConditionalGeneration": "clustrs.serving.llava:PrunedOnevision",
    "Qwen2_5_VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen25VL",
    "Qwen3VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen3VL",
}
"""The architectures that can be served, and where vLLM finds the pruned one."""
TOWERS = {"clip_vision_model": "default", "siglip_vision_model": "full"}
"""Vision towers of LLaVA that have scores, and the `vision_feature_select_strategy` that suits them."""
TOWERS_CHECKED = ("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")
"""The architectures with one of these towers."""
AVAILABLE = ("attention", "layout")
"""What a method may need besides the tokens: what can be had from a vision tower whose heads are split over ranks."""
TESTED = (0, 32)
"""Major and minor number of the vLLM releases that are tested."""


def read_method(settings: Any) -> Pruner:
    """The method that the key describes: {"method": name, "keep": count or fraction, any parameter: value}."""
    if not isinstance(settings, Mapping):
        raise ValueError(f'{KEY}={settings!r}: give an object, for example {{"method": "clustrs", "keep": 64}}')
    parameters = dict(settings)
    name = parameters.pop("method", DEFAULT_METHOD)
    if not isinstance(name, str):
        raise ValueError(f"method={name!r}: give the name of a method, for example {DEFAULT_METHOD!r}")
    if "keep" not in parameters:
        raise ValueError("keep is missing: give a count (64) or a fraction (0.25) of an image's visual tokens")
    validation.keep(parameters["keep"])
    method = get_method(name, **parameters)
    lacking = [need for need in method.requirements() if need not in AVAILABLE]
    if lacking:
        raise ValueError(
            f"method={name!r} can't be served: it needs {' and '.join(lacking)} of the vision tower; "
            f"give a method that needs only tokens, {' and '.join(AVAILABLE)}"
        )
    return method


def check_model(config: Any) -> str:
    """The architecture of a model that can be served pruned; takes the model's config, as transformers reads it."""
    architecture = check_architectures(getattr(config, "architectures", None))
    if architecture in TOWERS_CHECKED:
        check_tower(config)
    return architecture


def check_architectures(architectures: Sequence[str] | None) -> str:
    """The name of vLLM's own architecture, of a config that names it or the pruned one."""
    for name in architectures or ():
        if name.removeprefix(PREFIX) in ARCHITECTURES:
            return name.removeprefix(PREFIX)
    given = ", ".join(architectures or ()) or "none"
    raise ValueError(f"architecture {given} can't be served pruned: give a model of {', '.join(ARCHITECTURES)}")


def check_tower(config: Any) -> None:
    """Refuse what vLLM's LLaVA reads differently from transformers, or what has no scores."""
    tower = config.vision_config.model_type
    if tower not in TOWERS:
        raise ValueError(f"vision tower {tower!r} can't be served pruned: give {' or '.join(TOWERS)}")
    if not isinstance(config.vision_feature_layer, int):
        raise ValueError(f"vision_feature_layer={config.vision_feature_layer!r}: give one layer (an int)")
    strategy = config.vision_feature_select_strategy
    if strategy != TOWERS[tower]:
        raise ValueError(f"vision_feature_select_strategy={strategy!r} does not suit {tower}: give {TOWERS[tower]!r}")


def check_version(version: str) -> None:
    """Accept the vLLM releases that are tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) != TESTED:
        tested = ".".join(map(str, TESTED))
        raise ValueError(f"vLLM {version} is not tested with this version of clustrs: install vllm=={tested}.*")


def describe(config: Any, method: Pruner) -> str:
    """What is pruned to what, in one line."""
    if check_architectures(config.architectures) not in TOWERS_CHECKED:
        return f"{method!r}: keeps {_share(method.keep)} of each image"
    tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    if hasattr(config, "image_grid_pinpoints"):
        return f"{method!r}: keeps {_share(method.keep)} of each image, which has {tokens} per crop"
    return f"{method!r}: {tokens} -> {method.count(tokens)} visual tokens per image"


def _share(keep: int | float) -> str:
    return f"{keep} visual tokens" if isinstance(keep, int) else f"{keep:.4g} of the visual tokens"
