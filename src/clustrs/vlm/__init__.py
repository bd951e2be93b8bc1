"""How a transformers model is opened: its pictures' tokens, their scores, and the two doors that prune them."""

from clustrs.vlm.attach import Handle, PictureSelection

__all__ = ["Handle", "PictureSelection"]
