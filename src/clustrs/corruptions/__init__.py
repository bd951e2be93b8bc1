"""How a picture is spoiled, seeded by the picture and by nothing that depends on the run's order."""

from clustrs.corruptions.corruption import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption

__all__ = ["IMAGENET_C_LEVELS", "PAPER_LEVELS", "Corruption"]
