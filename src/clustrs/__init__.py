"""ClustRS: fewer visual tokens for vision-language models, without training.

Everything that is public can be imported from here. Names are imported when they are first used, so that
`import clustrs` and `clustrs --help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names once more, for type checkers and editors; a test compares them
    from clustrs.corruptions import IMAGENET_C_LEVELS as IMAGENET_C_LEVELS
    from clustrs.corruptions import PAPER_LEVELS as PAPER_LEVELS
    from clustrs.corruptions import Corruption as Corruption
    from clustrs.corruptions import list_corruptions as list_corruptions
    from clustrs.corruptions import register_corruption as register_corruption
    from clustrs.corruptions.contact_sheet import contact_sheet as contact_sheet
    from clustrs.corruptions.images import open_image as open_image
    from clustrs.embedded import image_path as image_path
    from clustrs.embedded import model_folder as model_folder
    from clustrs.evaluation.config import Config as Config
    from clustrs.evaluation.config import expand_methods as expand_methods
    from clustrs.evaluation.judge import Judge as Judge
    from clustrs.evaluation.judge import judge_run as judge_run
    from clustrs.evaluation.report import write_report as write_report
    from clustrs.evaluation.report.tuning import TunedCandidate as TunedCandidate
    from clustrs.evaluation.report.tuning import TuningResult as TuningResult
    from clustrs.evaluation.results import load_run as load_run
    from clustrs.evaluation.runner import run as run
    from clustrs.evaluation.tasks import Item as Item
    from clustrs.evaluation.tasks import Task as Task
    from clustrs.evaluation.tasks import get_task as get_task
    from clustrs.evaluation.tasks import list_tasks as list_tasks
    from clustrs.evaluation.tasks import register_task as register_task
    from clustrs.evaluation.tuning import tune as tune
    from clustrs.export import export_onnx as export_onnx
    from clustrs.export import export_selection as export_selection
    from clustrs.models.adapters.base import Adapter as Adapter
    from clustrs.models.adapters.base import PatchGrid as PatchGrid
    from clustrs.models.adapters.base import VisualTokens as VisualTokens
    from clustrs.models.adapters.base import list_model_types as list_model_types
    from clustrs.models.adapters.base import register_adapter as register_adapter
    from clustrs.models.ask import Answer as Answer
    from clustrs.models.ask import ask as ask
    from clustrs.models.ask import chat_prompt as chat_prompt
    from clustrs.models.attach import Handle as Handle
    from clustrs.models.configuration import PruningConfig as PruningConfig
    from clustrs.models.configuration import from_config as from_config
    from clustrs.models.costs import Cost as Cost
    from clustrs.models.costs import count_cost as count_cost
    from clustrs.models.draw import draw_comparison as draw_comparison
    from clustrs.models.draw import draw_kept as draw_kept
    from clustrs.models.draw import overlay_kept as overlay_kept
    from clustrs.models.load import load_model as load_model
    from clustrs.models.load import quiet_transformers as quiet_transformers
    from clustrs.models.select import ImageSelection as ImageSelection
    from clustrs.pruners import *  # noqa: F403
    from clustrs.validation import LoadOptions as LoadOptions

__version__ = "0.2.0"

_MODULES = {
    "corruptions": "Corruption IMAGENET_C_LEVELS PAPER_LEVELS list_corruptions register_corruption",
    "corruptions.contact_sheet": "contact_sheet",
    "corruptions.images": "open_image",
    "embedded": "image_path model_folder",
    "evaluation.config": "Config expand_methods",
    "evaluation.judge": "Judge judge_run",
    "evaluation.report": "write_report",
    "evaluation.report.tuning": "TunedCandidate TuningResult",
    "evaluation.results": "load_run",
    "evaluation.runner": "run",
    "evaluation.tasks": "Item Task get_task list_tasks register_task",
    "evaluation.tuning": "tune",
    "export": "export_onnx export_selection",
    "models.adapters.base": "Adapter PatchGrid VisualTokens list_model_types register_adapter",
    "models.ask": "Answer ask chat_prompt",
    "models.attach": "Handle",
    "models.configuration": "PruningConfig from_config",
    "models.costs": "Cost count_cost",
    "models.draw": "draw_comparison draw_kept overlay_kept",
    "models.load": "load_model quiet_transformers",
    "models.select": "ImageSelection",
    "pruners": "CDPruner ClustRS ClusterMeans Compose DART Denoise DivPrune Downsample EVS FastV FasterVLM Grid "
    "HiPrune HoloV InsidePruner LayerState Layout MMR NoPruning PruMergePlus Pruner PrunerInputs PyramidDrop Random "
    "SCOPE Selection ToMe VScan VidCom2 VisPruner VisionZip attach from_dict get_method list_methods list_presets "
    "method_class parse_method register split_methods variant_labels",
    "validation": "LoadOptions",
}
"""The public names by the module that defines them."""
_MODULE_OF = {name: f"clustrs.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'clustrs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
