"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`.

The pruned models are registered under names of their own. A config with the key `clustrs` is sent to them before vLLM
looks for its architecture; without the key nothing happens, and no class of vLLM is replaced.
"""

import functools
from typing import Any

from clustrs.serving import config

MARK = "_clustrs"
"""On a function of vLLM's that is wrapped already."""


def register() -> None:
    """Make the pruned models known to vLLM; it may call this several times in a process."""
    from vllm import ModelRegistry
    from vllm.config import ModelConfig

    known = ModelRegistry.get_supported_archs()
    for architecture, location in config.ARCHITECTURES.items():
        name = config.PREFIX + architecture
        if name not in known:
            ModelRegistry.register_model(name, location)
    resolve = ModelConfig.get_model_arch_config
    if not hasattr(resolve, MARK):
        ModelConfig.get_model_arch_config = _redirecting(resolve)


def _redirecting(resolve: Any) -> Any:
    """vLLM's first look at the architecture of a config that is read and overridden, with ours before it.

    It has to be this early: the class that vLLM finds for an architecture is remembered by the architecture's name.
    """

    @functools.wraps(resolve)
    def get_model_arch_config(model_config: Any) -> Any:
        redirect(model_config)
        return resolve(model_config)

    setattr(get_model_arch_config, MARK, True)
    return get_model_arch_config


def redirect(model_config: Any) -> None:
    """Send a model whose config has our key to its pruned architecture; an error if it can't be served."""
    settings = getattr(model_config.hf_config, config.KEY, None)
    if settings is None:
        return
    if hasattr(model_config, "model_arch_config"):  # a copy for a part of the model, such as its language model
        return
    import vllm

    config.check_version(vllm.__version__)
    config.read_method(settings)
    architecture = config.check_model(model_config.hf_config)
    if model_config.model_impl not in ("auto", "vllm"):
        raise ValueError(f"model_impl={model_config.model_impl!r} can't be served pruned: give 'auto' or 'vllm'")
    model_config.hf_config.architectures = [config.PREFIX + architecture]
