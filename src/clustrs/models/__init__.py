"""Transformers models: encode images, score and prune their tokens, compact the prompt, generate."""

from clustrs.models.attach import Handle
from clustrs.models.select import ImageSelection

__all__ = ["Handle", "ImageSelection"]
