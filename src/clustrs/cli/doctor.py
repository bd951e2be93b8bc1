"""`clustrs doctor`: what is installed, and with --try whether it works."""

import io
import os
import platform
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated, NamedTuple

from clustrs import __version__
from clustrs.cli import base
from clustrs.cli.base import Command, app
from clustrs.cli.catalog import PANEL, show
from clustrs.cli.options import AsJson, flag
from clustrs.plugins import install_hint

BROKEN = "broken"
LONGEST = 200  # of what an error says
JUDGE_KEY = "OPENAI_API_KEY"
DISTRIBUTIONS = {"PIL": "pillow", "umap": "umap-learn"}  # modules that are named otherwise than their packages


class Check(NamedTuple):
    """Something that is not needed to prune tokens: its modules, how it is installed, and a trial."""

    name: str
    modules: tuple[str, ...]
    install: str
    trial: tuple[str, ...] | Callable[[], str]  # modules to import, or a function that returns a note


class Finding(NamedTuple):
    """Result of a check; the state is "installed", "works", "not installed" or "broken"."""

    name: str
    state: str
    version: str
    note: str


@app.command("doctor", cls=Command, rich_help_panel=PANEL)
def doctor(
    try_all: Annotated[bool, flag("import each package and try it: takes a minute", "--try")] = False,
    json: AsJson = False,
) -> int:
    """List Python, torch, the accelerator and the optional packages, and what to do where one is missing.

    With --try, everything that is installed is tried. The exit code is 1 if something does not work.
    """
    findings = []
    for check in CHECKS:
        with base.status(f"trying {check.name}") if try_all else nullcontext():
            findings.append(examine(check, try_all))
    if os.environ.get(JUDGE_KEY):  # never shown
        findings.append(Finding("judge key", "set", "", f"{JUDGE_KEY} is there; it was not tried"))
    else:
        note = f"clustrs judge reads {JUDGE_KEY}; servers of your own may need none"
        findings.append(Finding("judge key", "not set", "", note))
    if not json:
        print(f"clustrs {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
        print(f"{describe_torch()}\n")
    columns = {"name": "what", "state": "state", "both": "packages, or what to do"}
    told = [{"both": "; ".join(filter(None, (one.version, one.note)))} for one in findings]
    listed = [one._asdict() for one in findings]
    show(listed if json else [{**one, **more} for one, more in zip(listed, told, strict=True)], columns, json)
    return int(any(finding.state == BROKEN for finding in findings))


def describe_torch() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        return f"torch is broken: {' '.join(str(error).split())[:LONGEST]}"
    if torch.cuda.is_available():
        device = f"CUDA {torch.version.cuda}: {torch.cuda.get_device_name()}"
    else:
        device = (
            "MPS" if torch.backends.mps.is_available() else f"no CUDA device, {torch.get_num_threads()} CPU threads"
        )
    return f"torch {torch.__version__}, {device}"


def examine(check: Check, try_it: bool = True) -> Finding:
    """Look for the modules of a check and perhaps try them; their own output is discarded."""
    installed, note = [module for module in check.modules if find_spec(module)], ""
    versions = []
    for name in (DISTRIBUTIONS.get(module, module) for module in installed):
        try:
            versions.append(f"{name.replace('_', '-')} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} of unknown version")
    if len(installed) < len(check.modules):
        return Finding(check.name, "not installed", ", ".join(versions), check.install)
    if not try_it:
        return Finding(check.name, "installed", ", ".join(versions), "")
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            if callable(check.trial):
                note = check.trial()
            else:
                list(map(import_module, check.trial))
    except (Exception, SystemExit) as error:  # a broken package raises what it likes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        return Finding(check.name, BROKEN, ", ".join(versions), reason)
    return Finding(check.name, "works", ", ".join(versions), note)


def try_models() -> str:
    from clustrs.models.adapters.base import list_model_types

    import_module("clustrs.models.attach")
    return f"{len(list_model_types())} families of models"


def try_vllm() -> str:
    from clustrs.serving import plugin, server

    server.check_installation()
    plugin.register()
    return "clustrs serve"


def try_triton() -> str:
    import torch

    import_module("triton")
    import_module("clustrs.ops.kernels")
    return "kernels on CUDA devices" if torch.cuda.is_available() else "no CUDA device: the kernels are not used"


def try_openvino() -> str:
    return f"devices: {', '.join(import_module('openvino').Core().available_devices)}"


ONNX = ("onnx", "onnxscript", "onnxruntime")
LMMS, RAY = ("lmms_eval", "clustrs_lmms"), ("ray", "clustrs_ray")
PAPER = install_hint("cli", package="clustrs-paper")
CHECKS = (
    Check("models", ("transformers", "PIL"), install_hint("models"), try_models),
    Check("embedded models", ("clustrs_models",), install_hint("models"), ("clustrs_models",)),
    Check("studies of the paper", ("clustrs_paper",), PAPER, ("clustrs_paper.command",)),
    Check("plots", ("matplotlib",), install_hint("plot"), ("matplotlib.figure",)),
    Check("triton kernels", ("triton",), "pip install triton (Linux with a CUDA device)", try_triton),
    Check("accelerate", ("accelerate",), "pip install accelerate", ("accelerate",)),
    Check("bitsandbytes", ("bitsandbytes",), "pip install bitsandbytes", ("bitsandbytes",)),
    Check("vLLM", ("vllm",), install_hint("vllm"), try_vllm),
    Check("lmms-eval", LMMS, install_hint("lmms-eval"), lambda: import_module("clustrs_lmms").check()),
    Check("ray engine", RAY, install_hint("ray"), RAY),
    Check("datasets of the hub", ("datasets",), install_hint("hub"), ("datasets",)),
    Check("UMAP of studies", ("umap",), install_hint("studies"), ("umap",)),
    Check("ONNX", ONNX, install_hint("onnx"), ONNX),
    Check("OpenVINO", ("openvino",), install_hint("openvino"), try_openvino),
    Check("web page", ("gradio",), install_hint("app"), ("gradio", "clustrs.app.server")),
    Check("judge", ("openai",), install_hint("cli"), ("openai", "clustrs.evaluation.judge")),
)
