"""What a run measures: the grid of methods, corruptions and seeds, and what else decides the answers."""

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
from clustrs.validation import Crops, Dtype, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope, excerpt

CONFIGS = "clustrs.configs"
"""Entry-point group of folders with ready configurations."""
CLEAN = "clean"
LARGEST = 2**63 - 1
"""Of integers: what files and other programs can hold."""
CHANGEABLE = ("batch_size", "device", "device_map")
"""What does not decide answers, so that it may change when a run is resumed: how many at a time, and where."""
DEEPEST = 20
"""Levels of a configuration file."""


@dataclass(frozen=True, kw_only=True)
class Config(LoadOptions):
    """Everything that decides a run's answers. `methods` are parameters as JSON has them, with the method's `name`."""

    task: str
    model: str
    methods: tuple[dict[str, Any], ...]
    corruptions: tuple[str, ...] = (CLEAN,)
    seeds: tuple[int, ...] = (0,)
    data: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int = 24
    """Questions that are answered together."""
    max_new_tokens: int | None = None
    """None: what the task says."""
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "compact"
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    reproduces: str | None = None
    """The published table that reports compare the run with; None: the one that fits its cells best."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Config).items():
            object.__setattr__(self, name, convert(name, getattr(self, name), hint))
        for name in ("methods", "corruptions", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: give at least one")
            if any(values.count(value) > 1 for value in values):
                raise ValueError(f"{name}: give each once")
        for name in ("batch_size", "limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LARGEST:
                raise ValueError(f"{name}={excerpt(value)}: give an integer of at least 1")
        for seed in self.seeds:
            if not 0 <= seed <= LARGEST:
                raise ValueError(f"seeds={excerpt(seed)}: give integers from 0 to {LARGEST}")
        for corruption in self.corruptions:
            parse_corruption(corruption)
        for method in self.methods:
            from_dict(method)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON has it, of the options of loading those that were given; `from_json` is the way
        back."""
        left_out = {one.name for one in fields(LoadOptions)} - set(self.given())
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name not in left_out}))

    def decisive(self) -> dict[str, Any]:
        """As `to_json`, without what may change while a run is resumed."""
        return {name: value for name, value in self.to_json().items() if name not in CHANGEABLE}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Config":
        """The configuration in a run's config.json; what else is stored there is left aside."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})


def convert(name: str, value: Any, hint: Any) -> Any:
    """A value of the type that an option has, in the form in which JSON would give it back."""
    if get_origin(hint) is Literal:
        validation.choice(name, value, get_args(hint))
    try:
        plain = json.loads(json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value))
        return msgspec.convert(plain, hint)
    except (ValueError, TypeError, RecursionError) as error:
        message = str(error)
        raise ValueError(f"{name}={excerpt(value)}: {message[:1].lower()}{message[1:]}") from None


def parse_corruption(text: str) -> Corruption | None:
    """None stands for a clean image."""
    return None if text == CLEAN else Corruption.parse(text)


def expand_methods(
    given: Sequence[str | Mapping[str, Any]], keeps: Sequence[int | float]
) -> tuple[dict[str, Any], ...]:
    """Each method at each budget, in full: "clustrs", "clustrs tau=2 shrink=false", or a mapping with a name.

    "all" stands for every method. A method that sets `keep` itself, and the one that keeps everything, come once.
    """
    results: list[dict[str, Any]] = []
    specs: list[str | Mapping[str, Any]] = []
    for spec in given:
        specs += sorted(list_methods(), key=lambda name: name != "none") if spec == "all" else [spec]
    for spec in specs:
        if not isinstance(spec, str | Mapping):
            raise ValueError(f"method {excerpt(spec)}: give a name, or a mapping with a name and parameters")
        parameters = parse_method(spec) if isinstance(spec, str) else dict(spec)
        once = parameters.get("name") == "none" or "keep" in parameters
        for keep in [None] if once else keeps:
            extra = {} if keep is None else {"keep": keep}
            method = from_dict({**parameters, **extra}).to_dict()
            if method not in results:
                results.append(method)
    return tuple(results)


def parse_task_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a task as KEY=VALUE."""
    return dict(validation.key_value(s, f"--set-task {s}: give KEY=VALUE, for example scoring=contains") for s in given)


def expand_corruptions(given: Sequence[str]) -> tuple[str, ...]:
    """`gaussian` stands for all levels of the paper, `paper` for all of its corruptions; the rest is NAME:LEVEL."""
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
    """What a configuration has that another has not, in words."""
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


TEXTS = list[str] | str
SETTINGS: dict[str, Any] = {
    "task": str,
    "data": str,
    "task_options": dict[str, Any],
    "model": str,
    "methods": list[str | dict[str, Any]] | str,
    "keep": list[int | float | str] | int | float | str,
    "corrupt": TEXTS,
    "seeds": list[int] | int,
    "limit": int,
    "batch_size": int,
    "max_new_tokens": int,
    "scope": Scope,
    "crops": Crops,
    "positions": Positions,
    "prompt_template": PromptTemplate,
    "image_padding": ImagePadding,
    "reproduces": str,
    "device": str,
    "dtype": Dtype,
    "attn": str,
    "load_in_8bit": bool,
    "load_in_4bit": bool,
    "device_map": str,
}
"""What a configuration file may hold, named as on the command line."""


def read_settings(path: Path) -> dict[str, Any]:
    """The options in a YAML file, named as on the command line; a name without a file is one that ships with us."""
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
        raise ValueError(f"config {str(path)!r}: give a mapping of options to values")
    settings = {key.replace("-", "_"): value for key, value in loaded.items() if value is not None}
    for key, value in settings.items():
        if key in SETTINGS:
            convert(f"config {str(path)!r}: {key}", value, SETTINGS[key])
    return settings


def parse_yaml(text: str) -> Any:
    """What a YAML text says. Aliases are refused, a few lines of them can stand for billions of values, and so is deep
    nesting, for which the parser takes very long."""
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
    """Corruption and seed, in the order in which they are run."""
    return list(product(config.corruptions, config.seeds))
