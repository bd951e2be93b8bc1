"""Configuration of a run: the grid of methods, corruptions and seeds, and everything else that decides answers."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from clustrs import validation
from clustrs.corruptions import PAPER_LEVELS, Corruption
from clustrs.plugins import install_hint, plugin_entries
from clustrs.pruners import from_dict, list_methods
from clustrs.pruners.registry import parse_method
from clustrs.validation import Attention, Crops, Dtype, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope

CONFIGS = "clustrs.configs"  # entry-point group of folders with ready configurations
CLEAN = "clean"
LARGEST = 2**63 - 1  # largest integer that files and other programs can hold
CHANGEABLE = ("batch_size", "device", "device_map")  # they decide no answers and may change when a run is resumed
DEEPEST = 20  # deepest nesting of a configuration file
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
Spec = str | Mapping[str, Any]  # a method as users write it
Seed = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


@dataclass(frozen=True, kw_only=True)
class Config(LoadOptions):
    """Configuration of a run.

    Options of loading the model (`device`, `dtype`, ...) are those of `LoadOptions`.

    Args:
        task: Name of the task, see `clustrs.list_tasks`.
        model: Folder, id of the Hugging Face hub, or name of an embedded model.
        methods: Methods with all parameters as JSON has them and their `name`, see `expand_methods`.
        corruptions: "clean" or NAME:LEVEL, see `expand_corruptions`.
        seeds: Seeds of the corruptions.
        data: Folder or file with the task's questions.
        task_options: Options of the task.
        limit: Number of questions, from the first on; None for all.
        batch_size: Questions that are answered together.
        max_new_tokens: Length of the longest answer; None for the task's own.
        scope: Tokens that compete with each other: those of an image (or video), of a crop, or of a frame.
        crops: Crops of an image that the model reads.
        positions: Positions of the kept tokens, as in `attach`; a run stores what "auto" chose.
        attention: Attention to the kept tokens, likewise.
        prompt_template: Template of the prompt.
        image_padding: Padding of the images.
        reproduces: Published table that reports compare the run with; None for the one that fits best.

    Raises:
        ValueError: A value is not valid.

    Examples:
        >>> config = Config(task="scenes", model="mini-llava", methods=expand_methods(["none", "clustrs"], [16, 50]))
        >>> [(method["name"], method["keep"]) for method in config.methods]
        [('none', 1.0), ('clustrs', 16), ('clustrs', 50)]
        >>> Config.from_json(config.to_json()) == config
        True
    """

    task: str
    model: str
    methods: tuple[dict[str, Any], ...]
    corruptions: tuple[str, ...] = (CLEAN,)
    seeds: tuple[Seed, ...] = (0,)
    data: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    limit: Count | None = None
    batch_size: Count = 24
    max_new_tokens: Count | None = None
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "auto"
    attention: Attention = "auto"
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    reproduces: str | None = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Config, include_extras=True).items():
            object.__setattr__(self, name, convert(name, getattr(self, name), hint))
        for name in ("methods", "corruptions", "seeds"):
            written = [json.dumps(value, sort_keys=True) for value in getattr(self, name)]
            if not written:
                raise ValueError(f"{name} must have at least one value, got none")
            for text, count in Counter(written).items():
                if count > 1:
                    raise ValueError(f"duplicate value in {name}: {validation.excerpt(json.loads(text))}")
        for corruption in self.corruptions:
            parse_corruption(corruption)
        for method in self.methods:
            from_dict(method)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON has it, the inverse of `from_json`; options of loading only if set."""
        left_out = {one.name for one in fields(LoadOptions)} - set(self.given())
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name not in left_out}))

    def decisive(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_json().items() if name not in CHANGEABLE}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Config":
        """Read the configuration in a run's config.json, without its metadata; older ones may lack an option."""
        known, before = {f.name for f in fields(cls)}, {"positions": "compact", "attention": "plain"}
        return cls(**before | {key: value for key, value in stored.items() if key in known})


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of an option, in the form in which JSON would return it."""
    if get_origin(hint) is Literal:
        validation.choice(name, value, get_args(hint))
    try:
        plain = json.loads(json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value))
        return msgspec.convert(plain, hint)
    except (ValueError, TypeError, RecursionError) as error:
        got, reason = validation.excerpt(value), str(error)
        raise ValueError(f"{name} is not valid, got {got} ({reason[:1].lower()}{reason[1:]})") from None


def parse_corruption(text: str) -> Corruption | None:
    return None if text == CLEAN else Corruption.parse(text)


def expand_methods(given: Sequence[Spec], keeps: Sequence[int | float]) -> tuple[dict[str, Any], ...]:
    """Expand methods to every budget, with all parameters.

    Args:
        given: Methods: "clustrs", "clustrs tau=2 shrink=false", a mapping with a name, or "all" for every method.
        keeps: Budgets, counts (int) or fractions (float). A method that sets `keep` itself, and "none", come once.

    Returns:
        The methods for `Config.methods`.

    Raises:
        ValueError: A method or a parameter is not known.

    Examples:
        >>> [method["keep"] for method in expand_methods(["divprune"], [16, 0.25])]
        [16, 0.25]
    """
    results: list[dict[str, Any]] = []
    every: list[Spec] = [*sorted(list_methods("encoder"), key=lambda name: name != "none")]
    for spec in (spec for one in given for spec in (every if one == "all" else [one])):
        if not isinstance(spec, str | Mapping):
            accepted = "a name, or a mapping with a name and parameters"
            raise ValueError(f"method must be {accepted}, got {validation.excerpt(spec)}")
        parameters = parse_method(spec) if isinstance(spec, str) else dict(spec)
        once = parameters.get("name") == "none" or "keep" in parameters
        for extra in [{}] if once else [{"keep": keep} for keep in keeps]:
            method = from_dict({**parameters, **extra}).to_dict()
            if method not in results:
                results.append(method)
    return tuple(results)


def expand_corruptions(given: Sequence[str]) -> tuple[str, ...]:
    """Expand corruptions to levels.

    Args:
        given: "clean", NAME:LEVEL, a name for all levels of the paper, or "paper" for all its corruptions.

    Returns:
        The corruptions for `Config.corruptions`.

    Examples:
        >>> expand_corruptions(["clean", "jpeg:30"])
        ('clean', 'jpeg:30')
    """
    results: list[str] = []
    for name in (one for text in given for one in (PAPER_LEVELS if text == "paper" else [text])):
        if name in PAPER_LEVELS:
            results += [str(Corruption(name, level)) for level in PAPER_LEVELS[name]]
        else:
            results.append(str(parse_corruption(name) or CLEAN))
    return tuple(dict.fromkeys(results))


def differences(stored: Mapping[str, Any], requested: Mapping[str, Any], within: str = "") -> list[str]:
    changes = []
    for key in sorted({*stored, *requested}):
        before, now = stored.get(key), requested.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            changes += differences(before, now, f"{within}{key}/")
        elif isinstance(before, list) and isinstance(now, list):
            gone = [json.dumps(value) for value in before if value not in now]
            new = [json.dumps(value) for value in now if value not in before]
            parts = [f"without {', '.join(gone)}"] * bool(gone) + [f"with {', '.join(new)}"] * bool(new)
            changes.append(f"{within}{key}: now {' and '.join(parts) or 'in another order'}")
        else:
            changes.append(f"{within}{key}: was {json.dumps(before)}, now {json.dumps(now)}")
    return changes


SETTINGS: dict[str, Any] = {
    **{name: hint for name, hint in get_type_hints(Config).items() if name != "corruptions"},
    "methods": list[str | dict[str, Any]] | str,
    "keep": list[int | float | str] | int | float | str,
    "corrupt": list[str] | str,
    "dtype": Dtype,
    "seeds": list[int] | int,
}
"""Options of a configuration file, named as on the command line."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read the options in a YAML file, or in a ready configuration of that name; named as on the command line."""
    import yaml

    shipped, where = shipped_configs(), f"config {str(path)!r}"
    source = path if os.path.isfile(path) else shipped.get(path.as_posix(), path)
    if not os.path.isfile(source):  # unlike Path.is_file, also for names that are too long
        ready = f"there is no such file; ready ones are {', '.join(sorted(shipped))}"
        if path.parts[:1] == ("paper",) and not any(name.startswith("paper/") for name in shipped):
            hint = install_hint("cli", package="clustrs-paper")
            ready += f"; those of the paper are in the package clustrs-paper: {hint}"
        raise ValueError(f"{where}: {ready}")
    depth = 0
    try:
        text = source.read_text(encoding="utf-8")
        for event in yaml.parse(text, yaml.SafeLoader):  # a few lines with aliases can stand for billions of values
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(f"nested more than {DEEPEST} deep")
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else "?"
                raise ValueError(f"line {line} has the alias *{event.anchor}: write the value out")
        loaded = yaml.safe_load(text)
    except Exception as error:  # besides its own errors, the parser lets through those of int() and of dates
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{where} is not YAML: {message}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(f"{where} must be a mapping of options to values")
    settings = {key.replace("-", "_"): value for key, value in loaded.items() if value is not None}
    for key, value in settings.items():
        convert(f"{where}: {key}", value, SETTINGS.get(key, Any))
    return settings


def shipped_configs() -> dict[str, Path]:
    """Return the ready configurations; an entry point `NAME = "package.folder"` offers its YAML files as NAME/..."""
    found = {path.stem: path for path in (Path(__file__).parent / "configs").glob("*.yaml")}
    for point in plugin_entries(CONFIGS):
        try:
            spec = find_spec(point.value)
        except Exception:  # whatever another package does wrong must not break the rest
            spec = None
        for folder in (spec and spec.submodule_search_locations) or ():
            found |= {f"{point.name}/{path.stem}": path for path in Path(folder).glob("*.yaml")}
    return found
