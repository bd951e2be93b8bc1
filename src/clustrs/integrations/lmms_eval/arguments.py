"""Parse `--model_args`: which model, how it is loaded and pruned, and how its images are corrupted."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from clustrs import __version__, validation
from clustrs.corruptions import Corruption
from clustrs.evaluation.config import CLEAN, LARGEST, convert, parse_corruption
from clustrs.pruners import Pruner, from_dict
from clustrs.pruners.registry import method_class, parse_method
from clustrs.validation import Attention, Crops, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope

DEFAULT_METHOD = "clustrs"


@dataclass(frozen=True, kw_only=True)
class ModelArguments(LoadOptions):
    """The settings of a model in lmms-eval. Those of `LoadOptions` say how it is loaded."""

    pretrained: str
    """A folder, a Hugging Face id, or an embedded model."""
    method: Pruner
    corrupt: Corruption | None = None
    seed: int = 0
    """Of the corruption."""
    image_id: str | None = None
    """The field of a task's documents that names their images. None: an image is known by its pixels."""
    batch_size: int = 1
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "compact"
    attention: Attention = "plain"

    def attach_options(self) -> dict[str, Any]:
        """Return the options of `attach`."""
        return {"scope": self.scope, "crops": self.crops, "positions": self.positions, "attention": self.attention}

    def to_json(self) -> dict[str, Any]:
        """Return all settings and the version of clustrs, as results store them."""
        described = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in OPTIONAL}
        return {
            "clustrs": __version__,
            **described,
            "method": self.method.to_dict(),
            "corrupt": CLEAN if self.corrupt is None else str(self.corrupt),
            **self.given(),
        }


OPTIONAL = {one.name for one in fields(LoadOptions)}
NAMES = {one.name for one in fields(ModelArguments)} | {"keep"}


def read_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Read model_args as lmms-eval splits them: numbers and booleans are converted, everything else is text.

    Any other name is a parameter of the method: tau=2, shrink=false, clip=[0.2,0.9].
    """
    values = {name: value for name, value in given.items() if value is not None}
    if "pretrained" not in values:
        raise ValueError("pretrained is missing (write pretrained=... with a folder, a Hugging Face id or mini-llava)")
    described = values.pop("method", DEFAULT_METHOD)
    parameters = {name: values.pop(name) for name in list(values) if name not in NAMES or name == "keep"}
    method = read_method(described, parameters)
    hints = get_type_hints(ModelArguments)
    for name, value in values.items():
        values[name] = read_value(name, value, hints[name])
    return ModelArguments(**values, method=method)


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Convert a setting to its type."""
    if name == "corrupt":
        if not isinstance(value, str):
            raise ValueError(f"corrupt must be NAME:LEVEL (for example gaussian:0.5) or {CLEAN}, got {value!r}")
        return parse_corruption(value)
    if name == "batch_size":
        return read_batch_size(value)
    found = convert(name, value, validation.plain_hint(hint))
    if name == "seed" and not 0 <= found <= LARGEST:
        raise ValueError(f"seed must be an integer from 0 to {LARGEST}, got {value!r}")
    return found


def read_batch_size(value: Any) -> int:
    """Convert the batch size, which lmms-eval passes as text."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ValueError(f"batch_size must be an integer of at least 1, got {value!r}")
    return int(text)


def read_method(described: Any, parameters: Mapping[str, Any]) -> Pruner:
    """Build a method from its name, or from name and parameters as in `clustrs eval --methods "clustrs tau=2"`."""
    if not isinstance(described, str):
        raise ValueError(f"method must be the name of a method (for example {DEFAULT_METHOD}), got {described!r}")
    settings = parse_method(described.strip("\"'"))
    name = settings["name"]
    known = {one.name: one.default for one in fields(method_class(name))}
    for parameter, value in parameters.items():
        if parameter not in known:
            raise ValueError(unknown(name, known, parameter, value))
        settings[parameter] = from_text(value)
    if "keep" not in settings and known["keep"] is MISSING:
        raise ValueError("keep is missing (write keep=64 for a count, keep=0.25 for a fraction of the visual tokens)")
    return from_dict(settings)


def unknown(name: str, known: Iterable[str], parameter: str, value: Any) -> str:
    """Return the error text for a name that neither the model nor its method has."""
    settings = sorted(NAMES)
    own = [one for one in known if one not in NAMES]
    near = validation.nearest(parameter, [*settings, *own])
    accepted = f"{', '.join(settings)}, or a parameter of {name}: {', '.join(own)}"
    return f"unknown argument {parameter}={value!r}{near} (accepted: {accepted})"


def from_text(value: Any) -> Any:
    """Convert a parameter that lmms-eval left as text: JSON, or a word."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value
