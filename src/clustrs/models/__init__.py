"""How a transformers model is opened: its images' tokens, their scores, and the two doors that prune them."""

from clustrs.models.attach import Handle, ImageSelection

__all__ = ["Handle", "ImageSelection"]
