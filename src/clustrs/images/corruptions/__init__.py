"""How images are corrupted: by rule, seeded by the image and by nothing that depends on the run's order."""

from clustrs.images.corruptions.corruption import Corruption
from clustrs.images.corruptions.rules import (
    IMAGENET_C_LEVELS,
    PAPER_LEVELS,
    corruption_rule,
    list_corruptions,
    register_corruption,
)

__all__ = [
    "IMAGENET_C_LEVELS",
    "PAPER_LEVELS",
    "Corruption",
    "corruption_rule",
    "list_corruptions",
    "register_corruption",
]
