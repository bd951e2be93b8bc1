"""`clustrs ask` and `compare`: one question about one image, with one method or with several."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, get_args

from clustrs.cli import values
from clustrs.cli.protocol_options import add_protocol_options
from clustrs.embedded import DEFAULT, image_path
from clustrs.embedded import MODELS as EMBEDDED
from clustrs.options import Crops, Positions, Scope

if TYPE_CHECKING:
    from PIL import Image

    from clustrs.models.ask import Answer
    from clustrs.pruners import Pruner

DEFAULT_KEEP = 16
PARTS = ("vision", "scoring", "selection", "prefill", "decode_per_token")

ASK_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs ask sample:scene-1 "How many objects are there?"       the embedded model, 16 visual tokens chosen by ClustRS
  clustrs ask cat.jpg "What is this?" --model M --keep 0.25      a model of yours, a quarter of the tokens
  clustrs ask cat.jpg "What is this?" --model M --method none    all of them, for comparison
  clustrs ask cat.jpg "What is this?" --model M --set tau=2 --set shrink=false
  clustrs ask cat.jpg "What is this?" --model M --corrupt gaussian:0.5 --show kept.png
"""
COMPARE_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs compare sample:scene-1 "How many objects are there?"
  clustrs compare cat.jpg "What is this?" --model M --methods none,clustrs,fastervlm --corrupt salt_pepper:0.2
  clustrs compare cat.jpg "What is this?" --model M --methods none "clustrs tau=2" clustrs --keep 16 64
  clustrs compare cat.jpg "What is this?" --model M --show kept.png
lists are given with spaces or commas: --keep 16 64 is --keep 16,64
"""


def add_commands(commands: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    ask = commands.add_parser(
        "ask",
        help="ask a question about an image",
        description="Ask a question about an image. Prints the answer, how many visual tokens the language model "
        "read, and the time.",
        epilog=ASK_EXAMPLES,
        formatter_class=raw,
    )
    add_common(ask)
    ask.add_argument("--method", default="clustrs", help="how to choose the tokens (default: clustrs)")
    ask.set_defaults(run=run_ask)

    compare = commands.add_parser(
        "compare",
        help="ask with several methods, side by side",
        description="Ask the same question with several methods. Prints a table, times in milliseconds; the model is "
        "warmed up before.",
        epilog=COMPARE_EXAMPLES,
        formatter_class=raw,
    )
    add_common(compare)
    compare.add_argument(
        "--methods",
        action=values.Several,
        read=str,
        metavar="METHOD",
        default=["all"],
        help='methods, see clustrs methods; parameters may follow ("clustrs tau=2") (default: all)',
    )
    compare.set_defaults(run=run_compare)


def add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("image", metavar="IMAGE", help="an image file, or sample:NAME (see clustrs samples)")
    command.add_argument("question", metavar="QUESTION", help="what to ask")
    command.add_argument(
        "--model",
        metavar="ID_OR_FOLDER",
        default=DEFAULT,
        help=f"a folder, a Hugging Face id, or one of {', '.join(EMBEDDED)}, which come with the package and know "
        f"drawn scenes only (default: {DEFAULT})",
    )
    command.add_argument(
        "--keep",
        action=values.Several,
        read=values.keep,
        metavar="K",
        help=f"a count (16) or a fraction (0.25; 1.0 is all); compare takes several (default: {DEFAULT_KEEP})",
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action=values.Settings,
        default={},
        help="parameters of the method, see clustrs methods",
    )
    command.add_argument(
        "--corrupt",
        metavar="NAME:LEVEL",
        help="corrupt the image first, for example gaussian:0.5; see clustrs corruptions",
    )
    command.add_argument(
        "--seed", action=values.One, read=values.seed, default=0, help="seed of the corruption (default: 0)"
    )
    add_choices(command, scope="image", crops="all", positions="compact")
    command.add_argument(
        "--max-new-tokens", action=values.One, read=values.integer(), default=64, help="longest answer (default: 64)"
    )
    add_protocol_options(command, default="checkpoint")
    command.add_argument("--show", metavar="FILE", help="draw the kept tokens to a .png, .pdf or .svg file")
    command.add_argument("--json", action="store_true", help="print JSON")


CHOICES = {
    "scope": (get_args(Scope), 'one budget for the whole "image" or for each "crop"'),
    "crops": (get_args(Crops), '"all" crops or the "base" crop alone'),
    "positions": (get_args(Positions), '"compact" or "original" position of kept tokens'),
}
"""Options of `attach`, and what they take; the first is the default."""


def add_choices(command: argparse.ArgumentParser, **defaults: str | None) -> None:
    for name, default in defaults.items():
        accepted, meaning = CHOICES[name]
        command.add_argument(
            f"--{name}",
            action=values.One,
            read=values.choice(accepted),
            default=default,
            metavar="|".join(accepted),
            help=f"{meaning} (default: {accepted[0]})",
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """The budget has an option of its own."""
    if "keep" in settings:
        raise ValueError(f"--set keep={settings['keep']}: give --keep {settings['keep']}")


def make_method(name: str, keep: int | float | None, settings: Mapping[str, Any]) -> "Pruner":
    """A method with these parameters, and a budget unless it is the one that keeps everything."""
    from clustrs.pruners import get_method

    if keep is None and name != "none":
        keep = DEFAULT_KEEP
    return get_method(name, **({} if keep is None else {"keep": keep}), **settings)


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written to a folder that may not exist yet: better known before a model has run."""
    try:
        existing = folder
        while not existing.exists():
            existing = existing.parent
        problem = "" if existing.is_dir() else f"{str(existing)!r} is not a folder"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{str(existing)!r} is read-only"
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise ValueError(f"{option} {str(folder)!r}: {problem}, give a folder that can be written to")


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written, as far as its name and its folder tell."""
    try:
        folder = path.is_dir()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r}: {error.strerror}, give another name") from None
    if folder:
        raise ValueError(f"{option} {str(path)!r}: this is a folder, give the name of a file")
    check_folder(option, path.parent)


class Question:
    """What `ask` and `compare` have in common: the options checked, the cheap ones first, and the model loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        from clustrs.images.corruptions import Corruption
        from clustrs.images.open import open_image
        from clustrs.models import plot
        from clustrs.models.load import load_model, quiet_transformers
        from clustrs.models.protocol import apply_image_padding

        self.options = options
        if options.show:
            plot.check_path(options.show)
            check_file("--show", Path(options.show))
        self.corruption = Corruption.parse(options.corrupt) if options.corrupt else None
        path = image_path(options.image)
        image = open_image(path)
        self.image: Image.Image = self.corruption.apply(image, path.name, options.seed) if self.corruption else image
        quiet_transformers()
        self.model, processor = load_model(options.model)
        self.processor = apply_image_padding(processor, options.image_padding)

    def ask(self, method: "Pruner", max_new_tokens: int | None = None) -> "Answer":
        from clustrs.models.ask import ask

        options = self.options
        return ask(
            self.model,
            self.processor,
            self.image,
            options.question,
            method,
            max_new_tokens or options.max_new_tokens,
            scope=options.scope,
            crops=options.crops,
            positions=options.positions,
            prompt_template=options.prompt_template,
        )

    def seen(self) -> "Image.Image":
        from clustrs.models.ask import as_seen

        return as_seen(self.processor, self.image)

    def title(self, method: str = "") -> str:
        parts = [method, self.options.question, str(self.corruption or "")]
        return " | ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        names = ("image", "question", "model", "scope", "crops", "positions", "prompt_template", "image_padding")
        corruption = {**asdict(self.corruption), "seed": self.options.seed} if self.corruption else None
        given = {name: getattr(self.options, name) for name in names}
        return {**given, "corruption": corruption, "drawing": self.options.show}


def answer_json(method: "Pruner", answer: "Answer") -> dict[str, Any]:
    return {
        "method": method.to_dict(),
        "answer": answer.text,
        "unpruned_tokens": answer.unpruned_tokens,
        "visual_tokens": answer.visual_tokens,
        "new_tokens": answer.new_tokens,
        "seconds": asdict(answer.seconds),
        "kept": answer.image.selection.indices.tolist(),
    }


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def run_ask(options: argparse.Namespace) -> None:
    check_settings(options.set)
    budgets = options.keep or [None]
    if len(budgets) > 1:
        shown = " ".join(map(str, budgets))
        raise ValueError(f"--keep {shown}: ask takes one budget, clustrs compare takes several")
    method = make_method(options.method, budgets[0], options.set)
    question = Question(options)
    answer = question.ask(method)
    if options.json:
        print(json.dumps({**question.as_json(), **answer_json(method, answer)}, indent=2))
    else:
        times = [f"{part} {milliseconds(getattr(answer.seconds, part))}" for part in PARTS[:-1]]
        times.append(f"decode {milliseconds(answer.seconds.decode_per_token)} a token")
        print(answer.text)
        print(f"\n{method.name}: {answer.visual_tokens} of {answer.unpruned_tokens} visual tokens went in, ", end="")
        print(f"{answer.new_tokens} new tokens came out")
        print(f"milliseconds: {', '.join(times)}")
        print(about(options.model), end="")
    if options.show:
        from clustrs.models import plot

        plot.draw_kept(question.seen(), answer.image, options.show, question.title(method.name))
        print(end="" if options.json else f"drawing: {options.show}\n")


def about(model: str) -> str:
    """A line on the model when it is an embedded one."""
    return f"model: {model}, embedded; it knows drawn scenes only (--model for another)\n" if model in EMBEDDED else ""


def run_compare(options: argparse.Namespace) -> None:
    methods = compared(options)
    question = Question(options)
    question.ask(methods[0], max_new_tokens=2)  # the first call pays for what is set up once
    answers = [question.ask(method) for method in methods]
    if options.json:
        results = [answer_json(method, answer) for method, answer in zip(methods, answers, strict=True)]
        print(json.dumps({**question.as_json(), "results": results}, indent=2))
    else:
        print(table(methods, answers))
        print(about(options.model), end="")
    if options.show:
        from clustrs.models import plot

        panels = {
            f"{label}: {shorten(answer.text, 32, placeholder=' ...')}": answer.image
            for label, answer in zip(labels(methods), answers, strict=True)
        }
        plot.draw_comparison(question.seen(), panels, options.show, question.title())
        print(end="" if options.json else f"drawing: {options.show}\n")


def compared(options: argparse.Namespace) -> list["Pruner"]:
    """The methods to compare at every budget; each takes those of the given parameters that it has."""
    from clustrs.pruners import list_methods, method_class, parse_method

    check_settings(options.set)
    every = sorted(list_methods(), key=lambda name: name != "none")  # what the others are compared with comes first
    specs = [name for spec in options.methods for name in (every if spec == "all" else [spec])]
    parsed = [parse_method(spec) for spec in specs]
    known = {one["name"]: {field.name for field in fields(method_class(one["name"]))} for one in parsed}
    for key in options.set:
        if not any(key in parameters for parameters in known.values()):
            raise ValueError(f"--set {key}: none of the methods has this parameter, see clustrs methods")
    methods: list[Pruner] = []
    for one in parsed:
        name = one.pop("name")
        settings = {key: value for key, value in options.set.items() if key in known[name]} | one
        once = name == "none" or "keep" in settings
        budgets = [settings.pop("keep", None)] if once else options.keep or [None]
        methods += [make_method(name, keep, settings) for keep in budgets]
    if any(methods.count(method) > 1 for method in methods):
        raise ValueError(f"--methods {' '.join(options.methods)}: give each method once")
    return methods


def labels(methods: list["Pruner"]) -> list[str]:
    """The names of methods, with what else tells them apart where a name comes more than once."""
    from clustrs.pruners import Pruner

    names = [method.name for method in methods]

    def label(method: Pruner) -> str:
        same = [other.to_dict() for other in methods if other.name == method.name]
        own = method.to_dict()
        differing = [key for key in own if any(other[key] != own[key] for other in same)]
        return " ".join([method.name, *(f"{key}={json.dumps(own[key])}" for key in differing)])

    return names if len(set(names)) == len(names) else [label(method) for method in methods]


def table(methods: list["Pruner"], answers: list["Answer"]) -> str:
    """A Markdown table, aligned; the answers come last, because they are long."""
    head = ["method", "tokens", *("decode/token" if part == "decode_per_token" else part for part in PARTS), "answer"]
    rows = [head]
    for label, answer in zip(labels(methods), answers, strict=True):
        times = [milliseconds(getattr(answer.seconds, part)) for part in PARTS]
        text = " ".join(answer.text.split()).replace("|", "\\|")
        rows.append([label, f"{answer.visual_tokens}/{answer.unpruned_tokens}", *times, text])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append(f"| {' | '.join([row[0].ljust(widths[0]), *numbers, row[-1]])} |")
    rules = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:]), ":-----"]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return "\n".join(lines)
