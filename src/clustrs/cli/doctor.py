"""`clustrs doctor`: which optional packages are there, and whether they work."""

import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

from clustrs.cli import base
from clustrs.cli.base import Command, app
from clustrs.cli.catalog import PANEL, show
from clustrs.cli.options import AsJson
from clustrs.plugins import install_hint

BROKEN = "broken"
LONGEST = 200  # of what an error says
JUDGE_KEY = "OPENAI_API_KEY"
distributions = cache(metadata.packages_distributions)


class Check(NamedTuple):
    """Something that is not needed to prune tokens: its modules, how it is installed, and a trial."""

    name: str
    modules: tuple[str, ...]
    install: str
    trial: tuple[str, ...] | Callable[[], str]  # modules to import, or a function that returns a note


class Finding(NamedTuple):
    """Result of a check; the state is "works", "not installed" or "broken"."""

    name: str
    state: str
    version: str
    note: str


@app.command("doctor", cls=Command, rich_help_panel=PANEL)
def doctor(json: AsJson = False) -> int:
    """Check the optional packages: installed, which version, whether they work, and what to do.

    The exit code is 1 if something that is installed does not work.
    """
    findings = []
    for check in CHECKS:
        with base.status(f"trying {check.name}"):
            findings.append(examine(check))
    if os.environ.get(JUDGE_KEY):  # never shown
        findings.append(Finding("judge key", "set", "", f"{JUDGE_KEY} is there; it was not tried"))
    else:
        note = f"clustrs judge reads {JUDGE_KEY}; servers of your own may need none"
        findings.append(Finding("judge key", "not set", "", note))
    columns = {"name": "what", "state": "state", "version": "version", "note": "note"}
    show([finding._asdict() for finding in findings], columns, json)
    return int(any(finding.state == BROKEN for finding in findings))


def examine(check: Check) -> Finding:
    """Look for the modules of a check and try them; their own output is discarded."""
    installed, note = [module for module in check.modules if find_spec(module)], ""
    versions = []
    for module in installed:
        try:  # modules of editable packages are not listed
            versions.append(metadata.version(distributions().get(module, [module])[0]))
        except metadata.PackageNotFoundError:
            versions.append("unknown")
    if len(installed) < len(check.modules):
        return Finding(check.name, "not installed", ", ".join(versions), check.install)
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
LMMS = ("lmms_eval", "clustrs_lmms")
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
    Check("ray engine", ("ray",), install_hint("ray"), ("ray",)),
    Check("datasets of the hub", ("datasets",), install_hint("hub"), ("datasets",)),
    Check("UMAP of studies", ("umap",), install_hint("studies"), ("umap",)),
    Check("ONNX", ONNX, install_hint("onnx"), ONNX),
    Check("OpenVINO", ("openvino",), install_hint("openvino"), try_openvino),
    Check("web page", ("gradio",), install_hint("app"), ("gradio", "clustrs.app.server")),
    Check("judge", ("openai",), install_hint("cli"), ("openai", "clustrs.evaluation.judge")),
)
