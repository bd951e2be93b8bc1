"""Configuration of a run: the grid of methods, corruptions and seeds, and everything else that decides answers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from clustrs import validation
from clustrs.corruptions import PAPER_LEVELS, Corruption
from clustrs.plugins import install_hint, plugin_entries
from clustrs.pruners import from_dict, list_methods
from clustrs.pruners.registry import parse_method
from clustrs.validation import (
    Attention,
    Crops,
    Dtype,
    ImagePadding,
    LoadOptions,
    Positions,
    PromptTemplate,
    Scope,
    excerpt,
)

CONFIGS = "clustrs.configs"
"""Entry-point group of folders with ready configurations."""
CLEAN = "clean"
LARGEST = 2**63 - 1
"""Largest integer that files and other programs can hold."""
CHANGEABLE = ("batch_size", "device", "device_map")
"""Options that do not decide answers and may change when a run is resumed."""
DEEPEST = 20
"""Deepest nesting of a configuration file."""


@dataclass(frozen=True, kw_only=True)
class Config(LoadOptions):
    """Configuration of a run.

    Options of loading the model (`device`, `dtype`, ...) are those of `LoadOptions`.

    Args:
        task: Name of the task, see `clustrs.evaluation.list_tasks`.
        model: Folder, id of the Hugging Face hub, or name of an embedded model.
        methods: Methods with all parameters as JSON has them and their `name`, see `expand_methods`.
        corruptions: "clean" or NAME:LEVEL, see `expand_corruptions`.
        seeds: Seeds of the corruptions.
        data: Folder or file with the task's questions.
        task_options: Options of the task.
        limit: Number of questions, from the first on; None for all.
        batch_size: Questions that are answered together.
        max_new_tokens: Length of the longest answer; None for the task's own.
        scope: Tokens that compete with each other: those of an image or of a crop.
        crops: Crops of an image that the model reads.
        positions: Positions of the kept tokens.
        attention: Attention to the kept tokens.
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
    seeds: tuple[int, ...] = (0,)
    data: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int = 24
    max_new_tokens: int | None = None
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "compact"
    attention: Attention = "plain"
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    reproduces: str | None = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Config).items():
            object.__setattr__(self, name, convert(name, getattr(self, name), hint))
        for name in ("methods", "corruptions", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} must have at least one value, got none")
            seen: set[str] = set()
            for value in values:
                written = json.dumps(value, sort_keys=True)
                if written in seen:
                    raise ValueError(f"duplicate value in {name}: {excerpt(value)}")
                seen.add(written)
        for name in ("batch_size", "limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LARGEST:
                raise ValueError(f"{name} must be an integer of at least 1, got {excerpt(value)}")
        for seed in self.seeds:
            if not 0 <= seed <= LARGEST:
                raise ValueError(f"seeds must be integers from 0 to {LARGEST}, got {excerpt(seed)}")
        for corruption in self.corruptions:
            parse_corruption(corruption)
        for method in self.methods:
            from_dict(method)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON has it, the inverse of `from_json`; options of loading only if set."""
        left_out = {one.name for one in fields(LoadOptions)} - set(self.given())
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name not in left_out}))

    def decisive(self) -> dict[str, Any]:
        """Return `to_json` without the options that may change when a run is resumed."""
        return {name: value for name, value in self.to_json().items() if name not in CHANGEABLE}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Config":
        """Read the configuration in a run's config.json, without the metadata stored with it."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of an option, in the form in which JSON would return it."""
    if get_origin(hint) is Literal:
        validation.choice(name, value, get_args(hint))
    try:
        plain = json.loads(json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value))
        return msgspec.convert(plain, hint)
    except (ValueError, TypeError, RecursionError) as error:
        message = str(error)
        raise ValueError(f"{name} is not valid, got {excerpt(value)} ({message[:1].lower()}{message[1:]})") from None


def parse_corruption(text: str) -> Corruption | None:
    """Parse "clean" (None) or NAME:LEVEL."""
    return None if text == CLEAN else Corruption.parse(text)


def expand_methods(
    given: Sequence[str | Mapping[str, Any]], keeps: Sequence[int | float]
) -> tuple[dict[str, Any], ...]:
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
    specs: list[str | Mapping[str, Any]] = []
    for spec in given:
        specs += sorted(list_methods(), key=lambda name: name != "none") if spec == "all" else [spec]
    for spec in specs:
        if not isinstance(spec, str | Mapping):
            raise ValueError(f"method must be a name, or a mapping with a name and parameters, got {excerpt(spec)}")
        parameters = parse_method(spec) if isinstance(spec, str) else dict(spec)
        once = parameters.get("name") == "none" or "keep" in parameters
        for keep in [None] if once else keeps:
            extra = {} if keep is None else {"keep": keep}
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
    for text in given:
        names = list(PAPER_LEVELS) if text == "paper" else [text]
        for name in names:
            if name in PAPER_LEVELS:
                results += [str(Corruption(name, level)) for level in PAPER_LEVELS[name]]
            else:
                corruption = parse_corruption(name)
                results.append(CLEAN if corruption is None else str(corruption))
    return tuple(dict.fromkeys(results))


def differences(stored: Mapping[str, Any], requested: Mapping[str, Any], within: str = "") -> list[str]:
    """Describe how two configurations differ."""
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
    shipped = shipped_configs()
    source = path if os.path.isfile(path) else shipped.get(path.as_posix(), path)
    if not os.path.isfile(source):  # unlike Path.is_file, also for names that are too long
        ready = f"there is no such file; ready ones are {', '.join(sorted(shipped))}"
        if path.parts[:1] == ("paper",) and not any(name.startswith("paper/") for name in shipped):
            ready += (
                f"; those of the paper are in the package clustrs-paper: {install_hint('cli', package='clustrs-paper')}"
            )
        raise ValueError(f"config {str(path)!r}: {ready}")
    try:
        loaded = parse_yaml(source.read_text(encoding="utf-8"))
    except Exception as error:  # besides its own errors, the parser lets through those of int() and of dates
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"config {str(path)!r} is not YAML: {message}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(f"config {str(path)!r} must be a mapping of options to values")
    settings = {key.replace("-", "_"): value for key, value in loaded.items() if value is not None}
    for key, value in settings.items():
        if key in SETTINGS:
            convert(f"config {str(path)!r}: {key}", value, SETTINGS[key])
    return settings


def parse_yaml(text: str) -> Any:
    """Parse YAML; aliases, a few lines of which can stand for billions of values, and deep nesting are refused."""
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1 if event.start_mark else "?"
            raise ValueError(f"line {line} has the alias *{event.anchor}: write the value out")
    return yaml.safe_load(text)


def shipped_configs() -> dict[str, Path]:
    """Return the ready configurations by name: those of this package, and NAME/... of entry points that name a folder.

    An entry point `NAME = "package.folder"` of the group `clustrs.configs` offers the YAML files in that folder.
    """
    found = {path.stem: path for path in (Path(__file__).parent / "configs").glob("*.yaml")}
    for point in plugin_entries(CONFIGS):
        try:
            spec = find_spec(point.value)
        except Exception:  # whatever another package does wrong must not break the rest
            spec = None
        for folder in (spec and spec.submodule_search_locations) or ():
            found |= {f"{point.name}/{path.stem}": path for path in Path(folder).glob("*.yaml")}
    return found


def grid(config: Config) -> list[tuple[str, int]]:
    """Return the pairs of corruption and seed in the order in which they are run."""
    return list(product(config.corruptions, config.seeds))
