"""Register the pruned models with vLLM, and check what can be served."""

import atexit
import functools
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from clustrs import validation
from clustrs.pruners.base import SERVED, Pruner
from clustrs.pruners.registry import get_method
from clustrs.serving.interfaces import check_interfaces

KEY = "clustrs"
DEFAULT_METHOD = "clustrs"
PREFIX = "Clustrs"  # before the name of vLLM's architecture in that of the pruned one
LLAVA = ("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")
ARCHITECTURES = {  # those with a pruned class of their own, and where vLLM finds it
    LLAVA[0]: "clustrs.serving.llava:PrunedLlava",
    LLAVA[1]: "clustrs.serving.llava:PrunedOnevision",
    "Qwen2_5_VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen25VL",
    "Qwen3VLForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen3VLMoe",
    "Qwen3_5ForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen35",
    "Qwen3_5MoeForConditionalGeneration": "clustrs.serving.qwen_vl:PrunedQwen35Moe",
    "Gemma4ForConditionalGeneration": "clustrs.serving.gemma4:PrunedGemma4",
}
GEMMA4 = "Gemma4ForConditionalGeneration"
BACKEND = (  # those that vLLM's Transformers backend runs, pruned
    *LLAVA,
    "LlavaNextForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
BACKEND_CLASS = "clustrs.serving.backend:PrunedTransformers"
BACKEND_PREFIX = f"{PREFIX}Transformers"
BOTH_WAYS = "an image's tokens attend to each other both ways, which vLLM's CPU build does not do"
NOT_SERVED = {
    "Gemma3ForConditionalGeneration": BOTH_WAYS,
    "PaliGemmaForConditionalGeneration": BOTH_WAYS,
}
Implementation = Literal["vllm", "transformers"]
# Vision towers of LLaVA that have scores, and the `vision_feature_select_strategy` that suits them.
TOWERS = {"clip_vision_model": "default", "siglip_vision_model": "full"}
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
MARK = "_clustrs"  # on a function of vLLM's that is wrapped already


def read_method(settings: Any) -> Pruner:
    """Build the method that the key describes: {"method": name, "keep": count or fraction, any parameter: value}."""
    what = 'an object such as {"method": "clustrs", "keep": 64}'
    validation.check(isinstance(settings, Mapping), KEY, what, settings)
    parameters = dict(settings)
    parameters.pop("positions", None)
    parameters.pop("keep_range", None)
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
    if positions == "compact" and check_architectures(config.architectures).startswith("Qwen"):
        raise ValueError("positions must be 'auto' or 'original' for a Qwen model, which has M-RoPE, got 'compact'")
    if positions == "original" and check_architectures(config.architectures) == GEMMA4:
        raise ValueError("positions must be 'auto' or 'compact' for Gemma 4 in vLLM, got 'original'")
    chosen: Literal["compact", "original"] = positions
    return adapter_class(config.model_type).auto_positions if positions == "auto" else chosen


def read_range(settings: Mapping[str, Any]) -> tuple[int | float, int | float] | None:
    """Return the smallest and the largest budget that a request may ask for; None if it may not."""
    given, keep = settings.get("keep_range"), settings["keep"]
    if given is None:
        return None
    what = f"a floor and a ceiling around keep={keep}, all counts or all fractions (for example [16, 256] around 64)"
    pair = isinstance(given, list | tuple) and len(given) == 2 and all(type(one) is type(keep) for one in given)
    validation.check(pair and given[0] <= keep <= given[1], "keep_range", what, given)
    for one in given:
        validation.keep(one)
    return given[0], given[1]


class Settings(NamedTuple):
    """How a model is pruned."""

    method: Pruner
    positions: Literal["compact", "original"]
    keep_range: tuple[int | float, int | float] | None = None


def with_keep(method: Pruner, keep: int | float | None) -> Pruner:
    """Return a method with another budget; None: its own."""
    if keep is None or (type(keep), keep) == (type(method.keep), method.keep):
        return method
    return replace(method, keep=keep)


def read_settings(config: Any) -> Settings:
    settings = getattr(config, KEY)
    return Settings(read_method(settings), read_positions(config), read_range(settings))


def choose_implementation(config: Any, model_impl: str = "auto") -> tuple[str, Implementation]:
    """Return the architecture of a model config, and whether a class of vLLM's or its Transformers backend runs it.

    Raises:
        ValueError: if it cannot be served pruned, or not by the implementation that is asked for.
    """
    validation.choice("model_impl", model_impl, ("auto", *get_args(Implementation)))
    architecture = check_architectures(getattr(config, "architectures", None))
    reasons = {"vllm": native_obstacle(config, architecture), "transformers": backend_obstacle(config, architecture)}
    wanted: tuple[Any, ...] = get_args(Implementation) if model_impl == "auto" else (model_impl,)
    for one in wanted:
        if not reasons[one]:
            return architecture, one
    raise ValueError(reasons[wanted[-1]])


def native_obstacle(config: Any, architecture: str) -> str:
    """Return why no class of our own can serve a model, "" if one can."""
    if architecture not in ARCHITECTURES:
        return f"{architecture} has no pruned class of its own"
    if architecture == GEMMA4 and config.text_config.use_bidirectional_attention == "vision":
        return f"this {architecture} cannot be served pruned: {BOTH_WAYS}"
    if architecture not in LLAVA:
        return ""
    tower, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
    layer = config.vision_feature_layer
    if tower not in TOWERS:
        return f"vision tower {tower!r} has no pruned class (supported: {', '.join(TOWERS)})"
    if not isinstance(layer, int):
        return f"vision_feature_layer must be one layer (an int), got {layer!r}"
    if strategy != TOWERS[tower]:
        return f"vision_feature_select_strategy for {tower} must be {TOWERS[tower]!r}, got {strategy!r}"
    return ""


def backend_obstacle(config: Any, architecture: str) -> str:
    """Return why vLLM's Transformers backend cannot serve a model, "" if it can."""
    if architecture not in BACKEND:
        if reason := native_obstacle(config, architecture):
            return reason
        what = "pass on deepstack features" if "VL" in architecture else "run linear attention"
        what = "pass on token ids, which its layers read" if architecture == GEMMA4 else what
        return f"{architecture} cannot be served by vLLM's Transformers backend, which does not {what}"
    if not architecture.startswith("Llava"):
        return ""
    from clustrs.models.adapters.base import HAS_CLS

    tower, strategy = config.vision_config.model_type, config.vision_feature_select_strategy
    if tower not in HAS_CLS:
        return f"vision tower {tower!r} cannot be served pruned (supported: {', '.join(HAS_CLS)})"
    needed = "default" if HAS_CLS[tower] else "full"
    if strategy != needed:
        return f"vision_feature_select_strategy for {tower} must be {needed!r}, got {strategy!r}"
    return ""


def pruned_name(architecture: str, implementation: Implementation) -> str:
    return (PREFIX if implementation == "vllm" else BACKEND_PREFIX) + architecture


def check_architectures(architectures: Sequence[str] | None) -> str:
    """Return the name of vLLM's own architecture for a config that names it or the pruned one."""
    for name in architectures or ():
        own = name.removeprefix(BACKEND_PREFIX).removeprefix(PREFIX)
        if own in NOT_SERVED:
            raise ValueError(f"{own} cannot be served pruned: {NOT_SERVED[own]}")
        if own in ARCHITECTURES or own in BACKEND:
            return own
    given, known = ", ".join(architectures or ()) or "none", dict.fromkeys((*ARCHITECTURES, *BACKEND))
    raise ValueError(f"architecture {given} cannot be served pruned (supported: {', '.join(known)})")


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
    ours = {pruned_name(name, "vllm"): location for name, location in ARCHITECTURES.items()}
    ours |= {pruned_name(name, "transformers"): BACKEND_CLASS for name in BACKEND}
    for name, location in ours.items():
        if name not in known:
            ModelRegistry.register_model(name, location)
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
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    check_interfaces(vllm.__version__)
    read_method(settings)
    if read_range(settings) is not None:
        allow_keep()
    architecture, implementation = choose_implementation(config, model_config.model_impl)
    if read_positions(config) == "original" and not architecture.startswith("Qwen"):
        # vLLM's runner then asks the model for positions in three rows. The language model keeps its own rotary layer.
        config.mrope_section = [1, 1, 1]
    remove_metrics_at_exit()
    announce(f"clustrs: ready: {describe(config, read_method(settings))}, {read_positions(config)} positions")
    name = pruned_name(architecture, implementation)
    if architecture in MODELS_CONFIG_MAP:  # what vLLM changes in its config for this architecture
        MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[architecture]
    config.architectures, model_config.model_impl = [name], "auto"


def metrics_prefix() -> str:
    """How the name of this process's own temporary folder of metrics begins; `clustrs serve` becomes the server."""
    return f"clustrs-metrics-{os.getpid()}-"


def remove_metrics_at_exit() -> None:
    folder = Path(os.environ.get(METRICS_FOLDER, ""))
    if folder.name.startswith(metrics_prefix()):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def announce(line: str) -> None:
    """Print a line when vLLM's server has started."""
    logger = logging.getLogger("uvicorn.error")

    def wait_for_start(record: logging.LogRecord) -> bool:
        if record.getMessage() == "Application startup complete.":
            print(line, flush=True)
        return True

    if not any(getattr(one, "__name__", "") == wait_for_start.__name__ for one in logger.filters):
        logger.addFilter(wait_for_start)


def allow_keep() -> None:
    """Let requests give `keep`, and only that, among the processor options that vLLM trusts no client with."""
    from vllm.renderers import online_renderer

    validate = online_renderer.validate_request_mm_kwargs
    if hasattr(validate, MARK):
        return

    @functools.wraps(validate)
    def validate_request_mm_kwargs(*, mm_processor_kwargs: dict[str, Any] | None, **others: Any) -> None:
        rest = {name: value for name, value in (mm_processor_kwargs or {}).items() if name != "keep"}
        validate(mm_processor_kwargs=rest or None, **others)

    setattr(validate_request_mm_kwargs, MARK, True)
    online_renderer.validate_request_mm_kwargs = validate_request_mm_kwargs
