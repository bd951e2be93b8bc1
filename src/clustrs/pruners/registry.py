"""Names of methods and presets, for the API, the command line, reports and plugins."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from clustrs import validation
from clustrs.plugins import load_plugins
from clustrs.pruners.base import Pruner

if TYPE_CHECKING:
    from clustrs.models.attach import Handle

Method = TypeVar("Method", bound=type[Pruner])
EVERY = "all"  # stands for every method in a list of methods
PLUS = re.compile(r"\s*\+\s*(?=[A-Za-z])")  # between two methods that are composed; 1e+5 has none
_methods: dict[str, type[Pruner]] = {}


def register(method: Method) -> Method:
    """Make a `Pruner` known under its `name`; a class decorator. The same module may register a name again.

    Args:
        method: A subclass of `Pruner` with a `name`. Its `presets` get names, too: "name-preset".

    Returns:
        The class as it was given.

    Raises:
        ValueError: Not a `Pruner` subclass with a name, or another module registered that name.

    Examples:
        >>> @register
        ... class FirstK(Pruner):
        ...     name = "first-k"
        ...
        ...     def _choose(self, inputs, k):
        ...         return torch.arange(k).repeat(len(inputs.tokens), 1)
        >>> get_method("first-k", keep=2).select(torch.rand(5, 3)).indices
        tensor([0, 1])
    """
    name = getattr(method, "name", None)
    if not (isinstance(method, type) and issubclass(method, Pruner) and isinstance(name, str) and name.strip()):
        raise ValueError(f"expected a Pruner subclass with a `name`, got {method!r}")
    before = _methods.setdefault(name, method)
    if before.__module__ != method.__module__:
        first, second = (f"{one.__module__}.{one.__qualname__}" for one in (before, method))
        raise ValueError(f"a method named {name!r} is registered already: {first} has the name, {second} needs another")
    _methods[name] = method
    return method


def registered_methods() -> dict[str, type[Pruner]]:
    """Return all methods by name; the first call loads those of other packages."""
    load_plugins("clustrs.pruners", lambda found: register(found) if isinstance(found, type) else None)
    return dict(sorted(_methods.items()))


def list_methods(where: str | None = None) -> list[str]:
    """Return the names of all methods, those of other packages included.

    Args:
        where: Only those that prune there: "encoder", "language model", or "both".

    Examples:
        >>> "clustrs" in list_methods()
        True
    """
    return [name for name, method in registered_methods().items() if where in (None, method.where)]


def list_presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name: each is a method's name and some parameters, and can be named wherever a method can.

    Examples:
        >>> list_presets()["clustrs-no-rrs"]
        {'name': 'clustrs', 'shrink': False}
    """
    known = registered_methods()
    return {
        f"{name}-{preset}": {"name": name, **parameters}
        for name, method in known.items()
        for preset, parameters in method.presets.items()
        if f"{name}-{preset}" not in known
    }


def resolve_preset(name: str) -> dict[str, Any]:
    """Return a method's name and parameters: those of a preset, or none."""
    presets = list_presets()
    names = [*registered_methods(), *presets]
    if name not in names:
        near = validation.nearest(name, names)
        raise ValueError(f"unknown method {name!r}{near}, expected one of {', '.join(names)}")
    return presets.get(name, {"name": name})


def method_class(name: str) -> type[Pruner]:
    """Return the class of a method.

    Args:
        name: The name of a method or a preset; a preset has the class of its method.

    Raises:
        ValueError: Unknown name.

    Examples:
        >>> method_class("clustrs-no-rrs").__name__
        'ClustRS'
    """
    return registered_methods()[resolve_preset(name)["name"]]


def get_method(name: str, /, **parameters: Any) -> Pruner:
    """Build a method by name.

    Args:
        name: The name of a method or a preset; see `list_methods` and `list_presets`.
        **parameters: `keep`, and parameters of the method. They override those of a preset.

    Raises:
        ValueError: Unknown name or parameter, a missing or a bad value.

    Examples:
        >>> get_method("vispruner", keep=0.25, important=0.4)
        VisPruner(keep=0.25, important=0.4)
    """
    parameters = {**resolve_preset(name), **parameters}
    name = parameters.pop("name")
    method = registered_methods()[name]
    known = {field.name: field for field in fields(method)}
    for parameter in parameters:
        if parameter not in known:
            near = validation.nearest(parameter, known)
            raise ValueError(f"{name} has no parameter {parameter!r}{near}: it has {', '.join(known)}")
    for key, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and key not in parameters:
            raise ValueError(f"{key} is missing: write get_method({name!r}, {key}=...)")
    return method(**parameters)


def from_dict(data: Mapping[str, Any]) -> Pruner:
    """Build a method from a mapping with its name (or a preset's) and parameters; the inverse of `Pruner.to_dict`.

    Args:
        data: The name under "name", and parameters.

    Raises:
        ValueError: No name, or what `get_method` raises.

    Examples:
        >>> from_dict({"name": "divprune", "keep": 16})
        DivPrune(keep=16)
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise ValueError(f"a method must be a dict with its name under 'name', got {data!r}")
    return get_method(data["name"], **{key: value for key, value in data.items() if key != "name"})


def as_method(name: str, given: Any, defaults: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> Pruner:
    """Build the method that a parameter `name` of another one holds: a method, its name, or a dict.

    `defaults` are parameters where it has none, `fixed` replace those it has.
    """
    if isinstance(given, Pruner):
        return replace(given, **fixed or {})
    described = parse_method(given) if isinstance(given, str) else given
    accepted = "a method, its name, or a dict with its name and parameters"
    validation.check(isinstance(described, Mapping), name, accepted, given)
    return from_dict({**defaults, **described, **(fixed or {})})


def parse_method(spec: str) -> dict[str, Any]:
    """Parse a method as the command line has it into what `from_dict` takes; a preset becomes its method.

    Args:
        spec: A name, then parameters KEY=VALUE; values are JSON, numbers with commas between them, or words. "A + B" is
            `Compose` of two methods.

    Raises:
        ValueError: An unknown name, or something else than KEY=VALUE after it.

    Examples:
        >>> parse_method("clustrs clip=0,0.5")
        {'name': 'clustrs', 'clip': [0, 0.5]}
    """
    first, plus, second = PLUS.sub("\0", spec, count=1).partition("\0")
    if plus:
        return {"name": "compose", "first": parse_method(first), "second": parse_method(second)}
    name, *settings = spec.split() or [""]
    method = resolve_preset(name)
    error = f"method {spec!r} must be a name and parameters KEY=VALUE (write clustrs tau=2)"
    return method | dict(validation.key_value(setting, error) for setting in settings)


def attach(model: Any, method: Pruner | str | Mapping[str, Any], **options: Any) -> "Handle":
    """Prune in a transformers model from now on; see `Pruner.attach`.

    Args:
        model: A vision-language model of a supported family; see `list_model_types`.
        method: A method, or its name and parameters: "clustrs keep=16", {"name": "clustrs", "keep": 16}.
        **options: scope, crops, positions, attention, deepstack, chunk, processor, question.

    Returns:
        A handle, as `Pruner.attach` does.

    Raises:
        ValueError: What `from_dict`, `parse_method` and `Pruner.attach` raise.

    Examples:
        >>> model, processor = load_model("mini-llava")
        >>> with attach(model, "clustrs keep=16") as handle:
        ...     handle.positions
        'original'
    """
    if not isinstance(method, Pruner):
        method = from_dict(parse_method(method) if isinstance(method, str) else method)
    return method.attach(model, **options)


def split_methods(text: str) -> list[str]:
    """Split a list of methods at its commas, without splitting the values of their parameters.

    A comma inside brackets belongs to a value; so does one after KEY=VALUE, unless (nearly) a method's name follows.

    Args:
        text: Methods as `parse_method` takes them, with commas between them.

    Raises:
        ValueError: An empty one.

    Examples:
        >>> split_methods("none,clustrs clip=0,0,divprune")
        ['none', 'clustrs clip=0,0', 'divprune']
    """
    names = [*registered_methods(), *list_presets(), EVERY]
    specs = [""]
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth <= 0:
            following = re.split(r"[\s,=]", text[at + 1 :].lstrip(), maxsplit=1)[0]
            if not ("=" in specs[-1] and following and not validation.nearest(following, names)):
                specs.append("")
                continue
        specs[-1] += sign
    specs = [spec.strip() for spec in specs]
    if "" in specs:
        raise ValueError("must be values separated by spaces or commas, none of them empty")
    return specs


def variant_labels(methods: Sequence[Pruner | Mapping[str, Any]], *, with_keep: bool = False) -> list[str]:
    """Label each method by its name, and variants of one method by what differs between them.

    A parameter is mentioned where it is not at its default, if the variants do not agree on it. So a label is short,
    no two different variants have the same one, and it can be typed on the command line.

    Args:
        methods: Methods, or what their `to_dict` returned.
        with_keep: Mention budgets, too, where those of one method differ.

    Examples:
        >>> variant_labels([{"name": "clustrs"}, {"name": "clustrs", "clip": [0, 0]}, {"name": "divprune"}])
        ['clustrs', 'clustrs clip=[0,0]', 'divprune']
    """
    described = [{"name": "", **(one.to_dict() if isinstance(one, Pruner) else one)} for one in methods]
    presets = list_presets()
    defaults = {name: _defaults(name) for name in {own["name"] for own in described}}
    variants: dict[str, list[dict[str, str]]] = {name: [] for name in defaults}
    for own in described:
        variants[own["name"]].append(
            {key: _text(value, key) for key, value in {**defaults[own["name"]], **own}.items()}
        )
    varied = {
        name: {key for key in set().union(*same) if len({one.get(key, "null") for one in same}) > 1}
        for name, same in variants.items()
    }
    labels = []
    for own in described:
        name = own["name"]
        usual = {key: _text(value, key) for key, value in defaults[name].items() if key in varied[name]}
        texts = {key: _text(value, key) for key, value in own.items() if key in varied[name]}
        differing = {key: text for key, text in texts.items() if usual.get(key) != text}
        budget = differing.pop("keep", None)
        for preset, known in presets.items():
            if {"name": name, **differing} == {key: _text(value) for key, value in known.items()}:
                name, differing = preset, {}
        if with_keep and budget is not None:
            differing["keep"] = budget
        labels.append(" ".join([name, *(f"{key}={value}" for key, value in differing.items())]))
    return labels


def display_label(label: str) -> str:
    """Write a name or a label of `variant_labels` as papers write it; unknown names stay as they are.

    Examples:
        >>> display_label("clustrs tau=2"), display_label("prumerge-plus"), display_label("mine")
        ('ClustRS tau=2', 'PruMerge+', 'mine')
    """
    name, space, rest = label.partition(" ")
    known = registered_methods().get(name)
    return label if known is None else known.label + space + rest


def _defaults(name: str) -> dict[str, Any]:
    """Return the default parameters of a method; nothing for one that is not installed."""
    method = registered_methods().get(name)
    return {} if method is None else {one.name: one.default for one in fields(method) if one.default is not MISSING}


def _text(value: Any, parameter: str = "") -> str:
    """Write a parameter as the command line takes it: 2.0 as 2, words without quotes, no spaces."""
    if isinstance(value, str):
        return value
    if isinstance(value, Pruner):
        value = value.to_dict()
    if (
        isinstance(value, Mapping) and "name" in value
    ):  # a wrapped method has the budget of its wrapper; not so the first of two
        rest = {key: one for key, one in value.items() if key != "name" and (key != "keep" or parameter == "first")}
        own = {key: one for key, one in rest.items() if _text(_defaults(value["name"]).get(key)) != _text(one)}
        return json.dumps({"name": value["name"], **own}, separators=(",", ":")) if own else str(value["name"])
    if isinstance(value, list | tuple):
        return f"[{','.join(json.dumps(one) if isinstance(one, str) else _text(one) for one in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, separators=(",", ":"))
