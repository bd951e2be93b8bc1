"""ClustRS: fewer and cleaner visual tokens for vision-language models, without training."""

from clustrs.pruners import (
    ClustRS,
    DivPrune,
    EncoderStates,
    FasterVLM,
    Grid,
    NoPruning,
    Pruner,
    Random,
    Selection,
    VisionZip,
    VisPruner,
    from_dict,
    get_method,
    list_methods,
    register,
)

__version__ = "0.1.0"

__all__ = [
    "ClustRS",
    "DivPrune",
    "EncoderStates",
    "FasterVLM",
    "Grid",
    "NoPruning",
    "Pruner",
    "Random",
    "Selection",
    "VisPruner",
    "VisionZip",
    "from_dict",
    "get_method",
    "list_methods",
    "register",
]
