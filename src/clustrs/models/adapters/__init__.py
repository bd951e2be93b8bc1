"""One file per family of models."""

from clustrs.models.adapters.base import (
    Adapter,
    VisualTokens,
    adapter_class,
    get_adapter,
    list_model_types,
    register_adapter,
)

__all__ = ["Adapter", "VisualTokens", "adapter_class", "get_adapter", "list_model_types", "register_adapter"]
