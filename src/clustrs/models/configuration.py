"""The pruning of a model as a file, `pruning.json`: the method, its parameters, and the options of attaching it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import clustrs
from clustrs import validation
from clustrs.pruners import Pruner, from_dict
from clustrs.validation import CHOICES, Attention, Crops, Deepstack, Positions, Scope, excerpt

if TYPE_CHECKING:
    from clustrs.models.attach import Handle

FILE = "pruning.json"
FORMAT = 1  # of the file; a reader refuses any other
LARGEST = 1_000_000  # bytes


@dataclass(frozen=True, kw_only=True)
class PruningConfig:
    """A method with the options of attaching it, as `pruning.json` has them. Calling it attaches it to a model.

    Args:
        method: The method with its budget.
        scope: As in `Pruner.attach`, like the options that follow.
        crops: Crops of an image that the model reads.
        positions: Positions of the kept tokens.
        attention: Attention to the kept tokens.
        deepstack: Features for later layers.
        tuned_on: What the choice is based on: model, images, measures; anything that JSON has.

    Examples:
        >>> config = PruningConfig(method=ClusterMeans(keep=16), positions="original")
        >>> from_config(config.save_pretrained(folder)) == config
        True
    """

    method: Pruner
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "auto"
    attention: Attention = "auto"
    deepstack: Deepstack = "raw"
    tuned_on: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validation.check(isinstance(self.method, Pruner), "method", "a Pruner", self.method)
        for name, kind in CHOICES.items():
            validation.choice(name, getattr(self, name), get_args(kind))
        validation.check(isinstance(self.tuned_on, Mapping), "tuned_on", "an object", self.tuned_on)

    def options(self) -> dict[str, Any]:
        """Return the options of `Pruner.attach`."""
        return {name: getattr(self, name) for name in CHOICES}

    def __call__(self, model: Any, **options: Any) -> "Handle":
        """Attach to a model; `options` of `Pruner.attach` replace those of the configuration."""
        return self.method.attach(model, **{**self.options(), **options})

    def to_dict(self) -> dict[str, Any]:
        """Return what the file holds; the inverse of `from_config`."""
        versions = {"format": FORMAT, "clustrs": clustrs.__version__}
        return {**versions, "method": self.method.to_dict(), **self.options(), "tuned_on": dict(self.tuned_on)}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write `pruning.json` into a folder, for example beside a checkpoint, and return its path."""
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        validation.write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")
        return path


def from_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> PruningConfig:
    """Read a pruning configuration.

    Args:
        source: The file, a folder with a `pruning.json` (of a checkpoint, of `clustrs tune`), or what the file holds.

    Returns:
        The configuration; calling it with a model attaches the method.

    Raises:
        ValueError: There is no such file, it is not JSON, or a value in it is wrong.

    Examples:
        >>> config = from_config({"format": 1, "method": {"name": "clustermeans", "keep": 16}})
        >>> model, processor = load_model("mini-llava")
        >>> with config(model) as handle:
        ...     handle.method
        ClusterMeans(keep=16...)
    """
    data: Any = source
    where = ""
    if not isinstance(source, Mapping):
        path = Path(source) / FILE if os.path.isdir(source) else Path(source)
        data, where = validation.parse_json(validation.read_text(path, LARGEST), repr(str(path))), f"{str(path)!r}: "
    known = {"format": FORMAT, "clustrs": "", **{one.name: None for one in fields(PruningConfig)}}
    try:
        validation.check(isinstance(data, Mapping), "the file", "an object", excerpt(data))
        if data.get("format") != FORMAT or isinstance(data["format"], bool):
            raise ValueError(f"format must be {FORMAT}, got {excerpt(data.get('format'))}")
        for name in data:
            if name not in known:
                raise ValueError(f"unknown entry {excerpt(name)}{validation.nearest(name, known)}")
        given = {name: value for name, value in data.items() if name not in ("format", "clustrs")}
        return PruningConfig(**{**given, "method": from_dict(given.get("method"))})  # type: ignore[arg-type]
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}{str(error)[:500]}") from None
    except RecursionError:
        raise ValueError(f"{where}a value is nested too deeply") from None
