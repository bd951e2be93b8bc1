"""How a image is spoiled, seeded by the image and by nothing that depends on the run's order."""

from clustrs.images.corruptions.corruption import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption

__all__ = ["IMAGENET_C_LEVELS", "PAPER_LEVELS", "Corruption"]
