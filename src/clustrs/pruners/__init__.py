"""Pruning methods, one file each, and the registry that names them."""

from clustrs.pruners.base import Pruner
from clustrs.pruners.baselines import Grid, NoPruning, Random
from clustrs.pruners.clustermeans import ClusterMeans
from clustrs.pruners.clustrs import ClustRS
from clustrs.pruners.denoise import Denoise
from clustrs.pruners.divprune import DivPrune
from clustrs.pruners.fastervlm import FasterVLM
from clustrs.pruners.inputs import Layout, PrunerInputs, Selection
from clustrs.pruners.registry import (
    attach,
    from_dict,
    get_method,
    list_methods,
    list_presets,
    method_class,
    parse_method,
    register,
    split_methods,
    variant_labels,
)
from clustrs.pruners.tome import ToMe
from clustrs.pruners.visionzip import VisionZip
from clustrs.pruners.vispruner import VisPruner

__all__ = [
    "ClustRS",
    "ClusterMeans",
    "Denoise",
    "DivPrune",
    "FasterVLM",
    "Grid",
    "Layout",
    "NoPruning",
    "Pruner",
    "PrunerInputs",
    "Random",
    "Selection",
    "ToMe",
    "VisPruner",
    "VisionZip",
    "attach",
    "from_dict",
    "get_method",
    "list_methods",
    "list_presets",
    "method_class",
    "parse_method",
    "register",
    "split_methods",
    "variant_labels",
]
