"""Register the pruned models with vLLM, and check what can be served."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from clustrs import validation
from clustrs.pruners.base import SERVED, Pruner
from clustrs.pruners.registry import get_method
from clustrs.serving.interfaces import check_interfaces

KEY = "clustrs"
DEFAULT_METHOD = "clustrs"
PREFIX = "Clustrs"  # before the name of vLLM's architecture in that of the pruned one
LLAVA = ("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")
ARCHITECTURES = {  # those that can be served, and where vLLM finds the pruned one
    LLAVA[0]: "clustrs.serving.llava:PrunedLlava",
    LLAVA[1]: "clustrs.serving.llava:PrunedOnevision",
    "Qwen2_5_VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen25VL",
    "Qwen3VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen3VL",
}
# Vision towers of LLaVA that have scores, and the `vision_feature_select_strategy` that suits them.
TOWERS = {"clip_vision_model": "default", "siglip_vision_model": "full"}
MARK = "_clustrs"  # on a function of vLLM's that is wrapped already


def read_method(settings: Any) -> Pruner:
    """Build the method that the key describes: {"method": name, "keep": count or fraction, any parameter: value}."""
    what = 'an object such as {"method": "clustrs", "keep": 64}'
    validation.check(isinstance(settings, Mapping), KEY, what, settings)
    parameters = dict(settings)
    parameters.pop("positions", None)
    attention = parameters.pop("attention", "plain")
    what = "'plain' in vLLM, whose kernels take no bias for each key"
    validation.check(attention in ("auto", "plain"), "attention", what, attention)
    name = parameters.pop("method", DEFAULT_METHOD)
    validation.check(isinstance(name, str), "method", f"the name of a method (for example {DEFAULT_METHOD!r})", name)
    if "keep" not in parameters:
        raise ValueError("keep is missing (a count such as 64, or a fraction such as 0.25 of the visual tokens)")
    validation.keep(parameters["keep"])
    method = get_method(name, **parameters)
    if method.where != "encoder":
        raise ValueError(f"method {name!r} cannot be served: it prunes inside the language model, which vLLM runs")
    if "question" in method.requirements():
        reason = "vLLM keeps an image's features for every request that shows it, whatever it asks"
        raise ValueError(f"method {name!r} cannot be served: it selects by the question, but {reason}")
    if not method.servable:
        missing = [need for need in method.requirements() if need not in SERVED]
        raise ValueError(
            f"method {name!r} cannot be served: it needs {' and '.join(missing)} of the vision tower "
            f"(servable methods need only tokens, {' and '.join(SERVED)})"
        )
    return method


def read_positions(config: Any) -> Literal["compact", "original"]:
    """Return the positions of kept tokens that a model's config asks for, by default what suits its family."""
    from clustrs.models.adapters.base import adapter_class

    positions = getattr(config, KEY).get("positions", "auto")
    validation.choice("positions", positions, get_args(validation.Positions))
    if positions == "compact" and check_architectures(config.architectures) not in LLAVA:
        raise ValueError("positions must be 'auto' or 'original' for a Qwen model, which has M-RoPE, got 'compact'")
    chosen: Literal["compact", "original"] = positions
    return adapter_class(config.model_type).auto_positions if positions == "auto" else chosen


def read_settings(config: Any) -> tuple[Pruner, Literal["compact", "original"]]:
    return read_method(getattr(config, KEY)), read_positions(config)


def check_model(config: Any) -> str:
    """Return the architecture of a model config, or raise ValueError if it cannot be served pruned."""
    architecture = check_architectures(getattr(config, "architectures", None))
    if architecture not in LLAVA:
        return architecture
    tower, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
    if tower not in TOWERS:
        raise ValueError(f"vision tower {tower!r} cannot be served pruned (supported: {', '.join(TOWERS)})")
    layer = config.vision_feature_layer
    validation.check(isinstance(layer, int), "vision_feature_layer", "one layer (an int)", layer)
    if strategy != TOWERS[tower]:
        raise ValueError(f"vision_feature_select_strategy for {tower} must be {TOWERS[tower]!r}, got {strategy!r}")
    return architecture


def check_architectures(architectures: Sequence[str] | None) -> str:
    """Return the name of vLLM's own architecture for a config that names it or the pruned one."""
    for name in architectures or ():
        if name.removeprefix(PREFIX) in ARCHITECTURES:
            return name.removeprefix(PREFIX)
    given = ", ".join(architectures or ()) or "none"
    raise ValueError(f"architecture {given} cannot be served pruned (supported: {', '.join(ARCHITECTURES)})")


def describe(config: Any, method: Pruner) -> str:
    keep, of_each = method.keep, ""
    share = f"{keep} visual tokens" if isinstance(keep, int) else f"{keep:.4g} of the visual tokens"
    if check_architectures(config.architectures) in LLAVA:
        tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        if not hasattr(config, "image_grid_pinpoints"):
            return f"{method!r}: {tokens} -> {method.count(tokens)} visual tokens per image"
        of_each = f", which has {tokens} per crop"
    return f"{method!r}: keeps {share} of each image{of_each}"


def register() -> None:
    """Make the pruned models known to vLLM; it may call this several times in a process."""
    from vllm import ModelRegistry
    from vllm.config import ModelConfig

    known = ModelRegistry.get_supported_archs()
    for architecture, location in ARCHITECTURES.items():
        if PREFIX + architecture not in known:
            ModelRegistry.register_model(PREFIX + architecture, location)
    resolve = ModelConfig.get_model_arch_config  # vLLM's first look at a config; later it remembers the class
    if hasattr(resolve, MARK):
        return

    @functools.wraps(resolve)
    def get_model_arch_config(model_config: Any) -> Any:
        redirect(model_config)
        return resolve(model_config)

    setattr(get_model_arch_config, MARK, True)
    ModelConfig.get_model_arch_config = get_model_arch_config


def redirect(model_config: Any) -> None:
    """Redirect a model whose config has our key to its pruned architecture, or raise ValueError."""
    config = model_config.hf_config
    settings = getattr(config, KEY, None)
    if settings is None or hasattr(model_config, "model_arch_config"):  # a copy for a part, such as the language model
        return
    import vllm

    check_interfaces(vllm.__version__)
    read_method(settings)
    architecture = check_model(config)
    chosen = model_config.model_impl
    validation.check(chosen in ("auto", "vllm"), "model_impl", "'auto' or 'vllm' for a pruned model", chosen)
    if read_positions(config) == "original" and architecture in LLAVA:
        # vLLM's runner then asks the model for positions in three rows. The language model keeps its own rotary layer.
        config.mrope_section = [1, 1, 1]
    config.architectures = [PREFIX + architecture]
