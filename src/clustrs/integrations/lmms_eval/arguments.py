"""Parse `--model_args`: which model, how it is loaded and pruned, and how its images are corrupted."""

import re
from collections.abc import Mapping
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

    pretrained: str  # A folder, a Hugging Face id, or an embedded model
    method: Pruner
    corrupt: Corruption | None = None
    seed: int = 0  # of the corruption
    image_id: str | None = None  # the field of a task's documents that names their images; None: by their pixels
    batch_size: int = 1
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "auto"
    attention: Attention = "auto"

    def to_json(self) -> dict[str, Any]:
        """Return all settings and the version of clustrs, as results store them."""
        return {
            "clustrs": __version__,
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in OPTIONAL},
            "method": self.method.to_dict(),
            "corrupt": CLEAN if self.corrupt is None else str(self.corrupt),
            **self.given(),
        }


OPTIONAL = {one.name for one in fields(LoadOptions)}
NAMES = {one.name for one in fields(ModelArguments)} | {"keep"}


def read_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Read model_args as lmms-eval splits them; a name that is not a setting is a parameter of the method (tau=2)."""
    values = {name: value for name, value in given.items() if value is not None}
    if "pretrained" not in values:
        raise ValueError("pretrained is missing (write pretrained=... with a folder, a Hugging Face id or mini-llava)")
    described = values.pop("method", DEFAULT_METHOD)
    if not isinstance(described, str):
        raise ValueError(f"method must be the name of a method (for example {DEFAULT_METHOD}), got {described!r}")
    method = parse_method(described.strip("\"'"))
    known = {one.name: one.default for one in fields(method_class(method["name"]))}
    hints = get_type_hints(ModelArguments)
    settings = {}
    for name, value in values.items():
        if name in hints:
            settings[name] = read_value(name, value, hints[name])
        elif name in known:
            method[name] = validation.key_value(f"{name}={value}", "")[1] if isinstance(value, str) else value
        else:
            own = [one for one in known if one not in NAMES]
            near = validation.nearest(name, [*sorted(NAMES), *own])
            accepted = f"{', '.join(sorted(NAMES))}, or a parameter of {method['name']}: {', '.join(own)}"
            raise ValueError(f"unknown argument {name}={value!r}{near} (accepted: {accepted})")
    if "keep" not in method and known["keep"] is MISSING:
        raise ValueError("keep is missing (write keep=64 for a count, keep=0.25 for a fraction of the visual tokens)")
    return ModelArguments(**settings, method=from_dict(method))


def read_value(name: str, value: Any, hint: Any) -> Any:
    if name == "corrupt":
        if not isinstance(value, str):
            raise ValueError(f"corrupt must be NAME:LEVEL (for example gaussian:0.5) or {CLEAN}, got {value!r}")
        return parse_corruption(value)
    if name == "batch_size":  # lmms-eval passes it as text
        if not re.fullmatch("0*[1-9][0-9]*", str(value)):
            raise ValueError(f"batch_size must be an integer of at least 1, got {value!r}")
        return int(value)
    found = convert(name, value, validation.plain_hint(hint))
    if name == "seed" and not 0 <= found <= LARGEST:
        raise ValueError(f"seed must be an integer from 0 to {LARGEST}, got {value!r}")
    return found
