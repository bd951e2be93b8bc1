"""Options that commands share: their types, how their words are read, what the shell completes."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from clustrs import validation
from clustrs.cli.base import LOADING, SEPARATOR, SETTINGS, given_options, say
from clustrs.embedded import EMBEDDED, SAMPLE, folder_of, list_known, samples
from clustrs.validation import Attention, Crops, Dtype, ImagePadding, Positions, PromptTemplate, Scope

if TYPE_CHECKING:
    from clustrs.models.configuration import PruningConfig

Function = TypeVar("Function", bound=Callable[..., Any])
Reader = Callable[[str], Any]  # makes a value of a word; its ValueError says what it must be ("must be a count")
Completion = list[tuple[str, str]]  # values with a note on each
LARGEST = 2**31 - 1
LARGEST_SEED = 2**63 - 1
MODEL, PRUNING, IMAGES, QUESTIONS = "Model", "Pruning", "Images", "Questions"


def takes(*groups: Callable[..., None]) -> Callable[[Function], Function]:
    """Add the parameters of other functions to those of a command, which gets their values in its `**given`."""

    def add(command: Function) -> Function:
        signatures = [inspect.signature(command), *map(inspect.signature, groups)]
        found = [one for signature in signatures for one in signature.parameters.values()]
        named = [one.replace(kind=one.KEYWORD_ONLY) for one in found if one.kind is not one.VAR_KEYWORD]
        command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return command

    return add


def integer(low: int = 1, high: int = LARGEST) -> Reader:
    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,20}", text, re.ASCII) and low <= int(text) <= high:
            return int(text)
        raise ValueError(f"must be an integer from {low} to {high}")

    return read


def read_keep(text: str) -> int | float:
    try:
        value = int(text) if re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII) else float(text)
        validation.keep(value)
    except ValueError:
        raise ValueError("must be a count (16) or a fraction (0.25)") from None
    return value


def one_of(kind: Any) -> Reader:
    options = get_args(kind)

    def read(text: str) -> str:
        if text not in options:
            raise ValueError(f"must be one of {', '.join(options)}{validation.nearest(text, options)}")
        return text

    return read


def split(words: Sequence[str]) -> list[str]:
    parts = [part.strip() for word in words for part in word.split(",")]
    if "" in parts:
        raise ValueError("must be values separated by spaces or commas, none of them empty")
    return parts


def split_methods(words: Sequence[str]) -> list[str]:
    """Split as `split` does, but not at commas inside the values of parameters (`clustrs clip=0,0`)."""
    if not any("=" in word for word in words):
        return split(words)
    from clustrs.pruners import registry

    return [spec for word in words for spec in registry.split_methods(word)]


def several(read: Reader = str, split: Callable[[Sequence[str]], list[str]] = split) -> Reader:
    """Return a reader of a list, each value by `read`, none of them twice."""

    def read_list(text: str) -> tuple[Any, ...]:
        values = []
        for word in split(text.split(SEPARATOR)):
            try:
                values.append(read(word))
            except ValueError as error:
                raise ValueError(f"{error}, got {word!r}") from None
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"has a duplicate value: {value}")
        return tuple(values)

    return read_list


def read_settings(*reserved: str) -> Reader:
    """Return a reader of KEY=VALUE pairs, the last one of a key counts; `reserved` keys have options of their own."""

    def read(text: str) -> dict[str, Any]:
        found = dict(validation.key_value(word, "must be KEY=VALUE (write tau=2)") for word in text.split(SEPARATOR))
        for key in reserved:
            if key in found:
                raise ValueError(f"must not contain {key} (write --{key} {found[key]})")
        return found

    return read


def option(
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    *flags: str,
    read: Reader | None = None,
    complete: Callable[[str], Completion] | None = None,
    choices: Any = None,
) -> Any:
    """Declare an option, for `Annotated`; a list has the reader `several(...)` and a metavar that ends in "..."."""
    if choices is not None:
        listed = [(value, "") for value in get_args(choices)]
        read, metavar, complete = one_of(choices), "|".join(get_args(choices)), lambda incomplete: listed

    def parse(value: Any) -> Any:
        if not isinstance(value, str) or read is None:  # a default
            return value
        try:
            return read(value)
        except ValueError as error:
            bare = str(error).startswith("must be") and ", got " not in str(error)
            given = f", got {' '.join(value.split(SEPARATOR))!r}" if bare else ""
            raise typer.BadParameter(f"{error}{given}") from None

    shown: dict[str, Any] = {"help": help, "metavar": metavar, "rich_help_panel": panel, "autocompletion": complete}
    return typer.Option(*flags, parser=parse if read else None, **shown)


def flag(help: str, name: str, panel: str | None = None) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel)


def complete_methods(incomplete: str) -> Completion:
    """Complete pruning methods and presets, also as the last of several that commas separate."""
    from clustrs.cli.catalog import describe_method
    from clustrs.pruners import list_methods, list_presets

    before, comma, _ = incomplete.rpartition(",")
    return [(before + comma + name, describe_method(name)["summary"]) for name in (*list_methods(), *list_presets())]


def complete_corruptions(incomplete: str) -> Completion:
    """Complete corruptions at the levels they are measured at, also as the last of several."""
    from clustrs.corruptions import corruption_rule, list_corruptions

    before, comma, _ = incomplete.rpartition(",")
    rules = [(name, corruption_rule(name)) for name in list_corruptions()]
    return [(f"{before}{comma}{name}:{level:g}", rule.accepted) for name, rule in rules for level in rule.levels]


def complete_images(incomplete: str) -> Completion:
    return [(f"{SAMPLE}{sample.name}", sample.licence) for sample in samples()]


def complete_models(incomplete: str) -> Completion:
    return [(model.name, f"embedded, {model.knows}") for model in EMBEDDED]


def complete_tasks(incomplete: str) -> Completion:
    from clustrs.evaluation.tasks import list_tasks

    return [(name, "") for name in list_tasks()]


KNOWN = f"a folder, a Hugging Face id, or an embedded model: {list_known()}"
Model = Annotated[str, option(KNOWN, "ID_OR_FOLDER", MODEL, complete=complete_models)]
METHOD = "how to choose the tokens: a method or a preset, see clustrs methods"
Method = Annotated[str, option(METHOD, "METHOD", PRUNING, complete=complete_methods)]
METHODS = 'methods or presets, see clustrs methods; parameters may follow: none "clustrs tau=2" clustrs-no-rrs'
Methods = Annotated[
    Sequence[str] | None,
    option(METHODS, "METHOD...", PRUNING, read=several(split=split_methods), complete=complete_methods),
]
KEEP = "a count (16) or a fraction (0.25; 1.0 is all) of the visual tokens (default: 16)"
Keep = Annotated[Sequence[float] | None, option(KEEP, "K...", PRUNING, read=several(read_keep))]
PRUNING_FILE = "method, budget, positions and attention from a pruning.json, or from the folder that has it"
PruningFile = Annotated[Path | None, option(PRUNING_FILE, "FILE", PRUNING)]
SETTING = "parameters of the method, see clustrs methods"
Settings = Annotated[Mapping[str, Any] | None, option(SETTING, SETTINGS, PRUNING, "--set", read=read_settings("keep"))]
CropsOption = Annotated[Crops, option("all crops, or the base crop alone", panel=PRUNING, choices=Crops)]
IMAGE = "an image file, or sample:NAME (see clustrs samples)"
Image = Annotated[str, typer.Argument(metavar="IMAGE", help=IMAGE, autocompletion=complete_images)]
CORRUPT = "corrupt the image first, for example gaussian:0.5; see clustrs corruptions"
Corrupt = Annotated[str | None, option(CORRUPT, "NAME:LEVEL", IMAGES, complete=complete_corruptions)]
Seed = Annotated[int, option("seed of the corruption", "SEED", IMAGES, read=integer(0, LARGEST_SEED))]
AsJson = Annotated[bool, flag("print JSON", "--json")]
OutputFolder = Annotated[Path, option("the folder to write to", "FOLDER", None, "-o", "--output")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]

TEMPLATE = "the model's own chat template, or LLaVA-1.5's with its system line"
PADDING = "as the model's processor does, or padded to a square with the mean color, as LLaVA-1.5 is evaluated"
DEVICE = "cpu, cuda, cuda:1, mps ... (default: an accelerator if any)"
DTYPE = "type of the weights (default: float32 on a CPU, the checkpoint's own elsewhere)"
ATTN = "attention implementation: sdpa, eager, flash_attention_2 ... (default: chosen by transformers)"
QUANTIZE = "quantize to {} bits (needs bitsandbytes or torchao)"
MAP = "spread the model over devices: auto, balanced ... (needs accelerate)"
POSITIONS = "positions of kept tokens: without gaps, their own, or what fits the family"
ATTENTION = "a kept token counts once, or as often as the tokens it stands for (auto: where attention takes a bias)"


def prompting(
    prompt_template: Annotated[PromptTemplate, option(TEMPLATE, panel=MODEL, choices=PromptTemplate)] = "checkpoint",
    image_padding: Annotated[ImagePadding, option(PADDING, panel=MODEL, choices=ImagePadding)] = "checkpoint",
) -> None:
    """Options of a prompt, for `takes`."""


def loading(
    device: Annotated[str | None, option(DEVICE, "DEVICE", LOADING)] = None,
    dtype: Annotated[Dtype | None, option(DTYPE, panel=LOADING, choices=Dtype)] = None,
    attn: Annotated[str | None, option(ATTN, "NAME", LOADING)] = None,
    load_in_8bit: Annotated[bool, flag(QUANTIZE.format(8), "--load-in-8bit", LOADING)] = False,
    load_in_4bit: Annotated[bool, flag(QUANTIZE.format(4), "--load-in-4bit", LOADING)] = False,
    device_map: Annotated[str | None, option(MAP, "MAP", LOADING)] = None,
) -> None:
    """Options of loading a model, for `takes`: the fields of `LoadOptions`."""


def attaching(
    scope: Annotated[
        Scope, option("one budget for the image, or for each crop", panel=PRUNING, choices=Scope)
    ] = "image",
    crops: CropsOption = "all",
    positions: Annotated[Positions, option(POSITIONS, panel=PRUNING, choices=Positions)] = "auto",
    attention: Annotated[Attention, option(ATTENTION, panel=PRUNING, choices=Attention)] = "auto",
) -> None:
    """Options of attaching a method, for `takes`."""


IN_FILE = ("method", "methods", "keep", "settings", "scope", "crops", "positions", "attention")


def read_pruning(
    ctx: typer.Context, file: Path | None, model: str | None = None, refused: Sequence[str] = ()
) -> "PruningConfig | None":
    """Read the file of --pruning; without it, the pruning.json beside a local checkpoint, if no option of pruning is
    given. None of the `refused` options may be set in it."""
    given = [name for name in IN_FILE if name in given_options(ctx)]
    if file is not None and given:
        flag = "--set" if given[0] == "settings" else f"--{given[0]}"
        raise ValueError(f"--pruning and {flag} exclude each other: the file has the method and all its options")
    folder = folder_of(model) if file is None and model and not given else None
    if file is None and (folder is None or not (folder / "pruning.json").exists()):
        return None
    from clustrs.models.configuration import PruningConfig, from_config

    config = from_config(file or folder)  # type: ignore[arg-type]
    if file is None:
        say(f"clustrs: pruning with {folder}/pruning.json: {config.method!r}")
    for name in refused:
        usual = getattr(PruningConfig, name)
        if getattr(config, name) != usual:
            raise ValueError(f"--pruning: {name} must be {usual!r} for {ctx.info_name}, got {getattr(config, name)!r}")
    return config
