"""Groups of options that several commands share: the model, the words and pixels it is given, where to prune."""

from dataclasses import dataclass, fields

from clustrs.cli.arguments import option
from clustrs.embedded import DEFAULT, list_known
from clustrs.validation import Crops, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope

MODEL, LOADING, PRUNING, IMAGES, QUESTIONS = "Model", "Loading the model", "Pruning", "Images", "Questions"
PANELS = {
    **dict.fromkeys(("model", "max_new_tokens", "new_tokens", "prompt_template", "image_padding"), MODEL),
    **dict.fromkeys((one.name for one in fields(LoadOptions)), LOADING),
    **dict.fromkeys(("method", "methods", "keep", "set", "scope", "crops", "positions"), PRUNING),
    **dict.fromkeys(("corrupt", "levels", "seed", "seeds", "count"), IMAGES),
    **dict.fromkeys(("task", "data", "set_task", "task_options", "limit", "batch_size", "judge_model"), QUESTIONS),
}
"""The panel of the help in which an option stands, by its name: the same in every command."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Which model, and how it is loaded."""

    model: str = option(
        DEFAULT,
        f"a folder, a Hugging Face id, or an embedded model: {list_known()}",
        metavar="ID_OR_FOLDER",
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The words and the pixels that a model is given."""

    prompt_template: PromptTemplate = option(
        "checkpoint", "the model's own chat template, or LLaVA-1.5's with its system line"
    )
    image_padding: ImagePadding = option(
        "checkpoint",
        "as the model's processor has it, or padded to a square with the mean colour instead of cropped, as "
        "LLaVA-1.5 is evaluated",
    )


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """How a method is attached."""

    scope: Scope = option("image", 'one budget for the whole "image" or for each "crop"')
    crops: Crops = option("all", '"all" crops or the "base" crop alone')
    positions: Positions = option("compact", '"compact" or "original" position of kept tokens')
