"""What a run measures: the grid of methods, corruptions and seeds, and what else decides the answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from clustrs import validation
from clustrs.images.corruptions import PAPER_LEVELS, Corruption
from clustrs.pruners import Pruner, get_method, list_methods, method_class

CLEAN = "clean"


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's answers. `methods` are parameters as JSON has them, with the method's `name`."""

    task: str
    model: str
    methods: tuple[dict[str, Any], ...]
    corruptions: tuple[str, ...] = (CLEAN,)
    seeds: tuple[int, ...] = (0,)
    data: str | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int = 24
    max_new_tokens: int | None = None
    """None: what the task says."""
    scope: str = "image"
    crops: str = "all"
    positions: str = "compact"

    def __post_init__(self) -> None:
        for name in ("methods", "corruptions", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: give at least one")
            if any(values.count(value) > 1 for value in values):
                raise ValueError(f"{name}: give each once")
        for name in ("batch_size", "limit", "max_new_tokens"):
            if getattr(self, name) is not None:
                validation.integer(name, getattr(self, name), 1)
        for seed in self.seeds:
            validation.integer("seeds", seed, 0)
        validation.choice("scope", self.scope, ("image", "crop"))
        validation.choice("crops", self.crops, ("all", "base"))
        validation.choice("positions", self.positions, ("compact", "original"))
        for corruption in self.corruptions:
            parse_corruption(corruption)
        for method in self.methods:
            make_method(method)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Config":
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in stored.items() if key in known}
        for name in ("methods", "corruptions", "seeds"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


def parse_corruption(text: str) -> Corruption | None:
    """None stands for a clean image."""
    return None if text == CLEAN else Corruption.parse(text)


def make_method(stored: Mapping[str, Any]) -> Pruner:
    if not isinstance(stored, Mapping) or not isinstance(stored.get("name"), str):
        raise ValueError(f"method {stored!r}: give its name and parameters")
    return get_method(stored["name"], **{key: value for key, value in stored.items() if key != "name"})


def describe_method(method: Pruner) -> dict[str, Any]:
    """The parameters of a method as records have them."""
    return method.to_dict()


def expand_methods(
    given: Sequence[str | Mapping[str, Any]], keeps: Sequence[int | float]
) -> tuple[dict[str, Any], ...]:
    """Each method at each budget, in full: "clustrs", "clustrs tau=2 shrink=false", or a mapping with a name.

    "all" stands for every method. A method that sets `keep` itself, and the one that keeps everything, come once.
    """
    found: list[dict[str, Any]] = []
    specs: list[str | Mapping[str, Any]] = []
    for spec in given:
        specs += sorted(list_methods(), key=lambda name: name != "none") if spec == "all" else [spec]
    for spec in specs:
        parameters = parse_method(spec) if isinstance(spec, str) else dict(spec)
        once = parameters.get("name") == "none" or "keep" in parameters
        for keep in [None] if once else keeps:
            extra = {} if keep is None else {"keep": keep}
            method = describe_method(make_method({**parameters, **extra}))
            if method not in found:
                found.append(method)
    return tuple(found)


def parse_method(spec: str) -> dict[str, Any]:
    """A method's name, and after it parameters as KEY=VALUE; values are JSON or words."""
    name, *settings = spec.split()
    method_class(name)
    complaint = f"method {spec!r}: after the name give KEY=VALUE, for example tau=2"
    return {"name": name, **dict(validation.key_value(setting, complaint) for setting in settings)}


def parse_task_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a task as KEY=VALUE."""
    return dict(validation.key_value(s, f"--set-task {s}: give KEY=VALUE, for example scoring=contains") for s in given)


def expand_corruptions(given: Sequence[str]) -> tuple[str, ...]:
    """`gaussian` stands for all levels of the paper, `paper` for all of its corruptions; the rest is NAME:LEVEL."""
    found: list[str] = []
    for text in given:
        names = list(PAPER_LEVELS) if text == "paper" else [text]
        for name in names:
            if name in PAPER_LEVELS:
                found += [str(Corruption(name, level)) for level in PAPER_LEVELS[name]]
            else:
                corruption = parse_corruption(name)
                found.append(CLEAN if corruption is None else str(corruption))
    return tuple(dict.fromkeys(found))


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What a configuration has that another has not, in words."""
    lines = []
    for key in sorted({*stored, *wanted}):
        before, now = stored.get(key), wanted.get(key)
        if before == now:
            continue
        if isinstance(before, list) and isinstance(now, list):
            gone = [json.dumps(value) for value in before if value not in now]
            new = [json.dumps(value) for value in now if value not in before]
            parts = [f"without {', '.join(gone)}"] * bool(gone) + [f"with {', '.join(new)}"] * bool(new)
            lines.append(f"{key}: now {' and '.join(parts) or 'in another order'}")
        else:
            lines.append(f"{key}: was {json.dumps(before)}, now {json.dumps(now)}")
    return lines


def read_settings(path: Path) -> dict[str, Any]:
    """The options in a YAML file, named as on the command line; a name without a file is one that ships with us."""
    import yaml

    shipped = shipped_configs()
    source = path if path.is_file() else shipped.get(path.as_posix(), path)
    if not source.is_file():
        raise ValueError(f"config {str(path)!r}: there is no such file; ready ones are {', '.join(sorted(shipped))}")
    try:
        loaded = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"config {str(path)!r} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ValueError(f"config {str(path)!r}: give a mapping of options to values")
    return {key.replace("-", "_"): value for key, value in loaded.items()}


def shipped_configs() -> dict[str, Path]:
    """The ready configurations by name; those of the paper's tables are called `paper/...`."""
    package = Path(__file__).parent.parent
    ours = {path.stem: path for path in (package / "evaluation" / "configs").glob("*.yaml")}
    return ours | {f"paper/{path.stem}": path for path in (package / "paper" / "configs").glob("*.yaml")}


def grid(config: Config) -> list[tuple[str, int]]:
    """Corruption and seed, in the order in which they are run."""
    return list(product(config.corruptions, config.seeds))
