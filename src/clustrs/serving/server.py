"""Start vLLM's OpenAI-compatible server with a pruned model. All that can be wrong is found before vLLM starts."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

from clustrs.embedded import folder_of
from clustrs.models.load import ADVICE
from clustrs.plugins import install_hint
from clustrs.serving import plugin
from clustrs.serving.interfaces import TESTED, check_interfaces
from clustrs.serving.plugin import METRICS_FOLDER

OVERRIDES = "--hf-overrides"
SERVED_NAME = "--served-model-name"
# Options of vLLM that a pruned model takes with these values only: with original positions, of a Qwen model, and in
# vLLM's Transformers backend.
ORIGINAL_ACCEPTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), ("1",)),
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), ()),
    "--enable-dbo": (),
}
BACKEND_ACCEPTED = {"--enable-mm-embeds": (), **dict.fromkeys(("--tensor-parallel-size", "-tp"), ("1",))}
QWEN_ACCEPTED = {"--enable-mm-embeds": (), "--mm-encoder-tp-mode": ("weights",), "--video-pruning-rate": ("0", "0.0")}


def serve(model_id: str, settings: dict[str, Any], options: Sequence[str] = ()) -> None:
    """Check everything, print what is pruned, and become the server with this process's id, for signals to reach it."""
    from transformers import AutoConfig

    from clustrs.corruptions.images import first_sentence

    plugin.read_method(settings)
    installed = check_installation()
    folder = folder_of(model_id)
    source = model_id if folder is None else str(folder)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers and the hub raise many kinds
        raise ValueError(f"model {model_id!r} could not be read: {first_sentence(error)}; {ADVICE}") from error
    impl = [value for name, value in option_values(options) if name == "--model-impl"]
    architecture, implementation = plugin.choose_implementation(config, impl[-1] if impl else "auto")
    setattr(config, plugin.KEY, settings)
    method, positions, allowed = plugin.read_settings(config)
    check_options(architecture, implementation, positions, options)
    overrides, words = split_overrides(options)
    # The name of the pruned architecture, too: vLLM without the plugin then refuses to start instead of not pruning.
    overrides |= {"architectures": [plugin.pruned_name(architecture, implementation)], plugin.KEY: settings}
    if source != model_id and not any(_read_option(word)[0] == SERVED_NAME for word in words):
        words = [SERVED_NAME, model_id, *words]
    # Overrides come last: an abbreviation of the same option does not win over them.
    arguments = [sys.executable, "-m", *server_words(source), *words, OVERRIDES, json.dumps(overrides)]
    if installed.partition("+")[0] != TESTED:
        print(f"clustrs: vLLM {installed} has the interfaces that the plugin uses; tested is {TESTED}", flush=True)
    ranges = f", {allowed[0]} to {allowed[1]} by request" if allowed else ""
    where = "a pruned class of vLLM's"
    if implementation == "transformers":
        reason = plugin.native_obstacle(config, architecture) or "--model-impl asks for it"
        where = f"vLLM's Transformers backend ({reason})"
    shown = f"{plugin.describe(config, method)}{ranges}, {positions} positions"
    print(f"clustrs: {model_id} with {shown}, in {where}", flush=True)
    # The encoder runs in a process of its own: its seconds reach /metrics by files.
    if METRICS_FOLDER not in os.environ:
        os.environ[METRICS_FOLDER] = tempfile.mkdtemp(prefix=plugin.metrics_prefix())
    # oneDNN keeps what it compiled for each number of tokens, 1,024 of them: with several budgets a server on the CPU
    # would grow by a fifth over its first 2,000 requests.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.execv(arguments[0], arguments)


def check_installation() -> str:
    """Return the version of vLLM that is installed; raise ValueError if it does not fit, or lacks the plugin."""
    installed = vllm_version()
    check_interfaces(installed)
    if not any(entry.name == plugin.KEY for entry in entry_points(group="vllm.general_plugins")):
        raise ValueError(f"the vLLM plugin of clustrs was not found: {install_hint('vllm')}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and plugin.KEY not in [name.strip() for name in allowed.split(",")]:
        raise ValueError(f"VLLM_PLUGINS={allowed!r} leaves out the plugin: add {plugin.KEY!r}, or unset it")
    return installed


def check_options(architecture: str, implementation: str, positions: str, options: Sequence[str]) -> None:
    lost = ORIGINAL_ACCEPTED if positions == "original" else {}
    one_row = not architecture.startswith("Qwen")
    own = BACKEND_ACCEPTED if implementation == "transformers" else {} if one_row else QWEN_ACCEPTED
    accepted = lost | own
    for name, given in option_values(options):
        key = name.partition(".")[0]
        if key in accepted and given not in accepted[key]:
            values = " or ".join(accepted[key])
            shown, advice = (f"{name} {given}", f"use {values}") if values else (name, "omit it")
            other = ", or --positions compact" if one_row and key in lost else ""
            raise ValueError(f"{shown} can't be combined with a pruned {architecture}: {advice}{other}")


def option_values(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name of each option, and the word after it or its own value."""
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        name, value = _read_option(option)
        yield name, following if value is None else value


def server_words(source: str) -> tuple[str, ...]:
    """vLLM's server for a model: `vllm serve`, or its module in builds of another name, where that command fails."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return "vllm.entrypoints.openai.api_server", "--model", source
    return "vllm.entrypoints.cli.main", "serve", source


def vllm_version() -> str:
    if find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed: {install_hint('vllm')}")
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version(packages_distributions()["vllm"][0])


def _read_option(word: str) -> tuple[str, str | None]:
    """An option's name as vLLM writes it (it takes underscores for dashes), and its value if the word has one."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None


def split_overrides(options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    rest, given, remaining = list[str](), "{}", iter(options)
    for option in remaining:
        name, value = _read_option(option)
        if name.startswith(f"{OVERRIDES}."):
            raise ValueError(f"{option} is not supported (pass all overrides as one object, {OVERRIDES} '{{...}}')")
        if name == OVERRIDES:
            given = next(remaining, "") if value is None else value
        else:
            rest.append(option)
    try:
        overrides = json.loads(given)
    except json.JSONDecodeError:
        overrides = None
    if not isinstance(overrides, dict):
        raise ValueError(f"{OVERRIDES} must be a JSON object, got {given}")
    if plugin.KEY in overrides:
        raise ValueError(f"{OVERRIDES}: the key {plugin.KEY!r} is set by --method, --keep and --set; leave it out")
    return overrides, rest
