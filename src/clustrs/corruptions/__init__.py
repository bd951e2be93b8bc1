"""How a picture is spoiled: seven corruptions, seeded by the picture and by nothing that depends on the run's order."""

from clustrs.corruptions.corruption import PAPER_LEVELS, Corruption

__all__ = ["PAPER_LEVELS", "Corruption"]
