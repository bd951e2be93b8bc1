"""`clustrs ask`, `compare`, `samples` and `methods`."""

import argparse
import json
from dataclasses import MISSING, asdict, fields
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from clustrs.embedded import DEFAULT, image_path, samples
from clustrs.embedded import MODELS as EMBEDDED

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
  clustrs compare cat.jpg "What is this?" --model M --show kept.png
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
    compare.add_argument("--methods", metavar="A,B", help="which methods (default: all)")
    compare.set_defaults(run=run_compare)

    samples = commands.add_parser(
        "samples",
        help="list the sample images",
        description="List the images that come with the package, with questions for the drawn ones and the right "
        "answers. Give sample:NAME wherever an image is asked for.",
    )
    samples.add_argument("--json", action="store_true", help="print JSON")
    samples.set_defaults(run=run_samples)

    methods = commands.add_parser("methods", help="list the methods", description="List the methods, their parameters.")
    methods.add_argument("--json", action="store_true", help="print JSON")
    methods.set_defaults(run=run_methods)


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
    command.add_argument("--keep", help=f"a count (16) or a fraction (0.25; 1.0 is all) (default: {DEFAULT_KEEP})")
    command.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a parameter of the method, see clustrs methods"
    )
    command.add_argument("--corrupt", metavar="NAME:LEVEL", help="spoil the image first, for example gaussian:0.5")
    command.add_argument("--seed", type=int, default=0, help="of the corruption (default: 0)")
    command.add_argument(
        "--scope", default="image", help='one budget for the whole "image" or for each "crop" (default: image)'
    )
    command.add_argument("--crops", default="all", help='"all" crops or the "base" crop alone (default: all)')
    command.add_argument(
        "--positions", default="compact", help='"compact" or "original" position of kept tokens (default: compact)'
    )
    command.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default: 64)")
    command.add_argument("--show", metavar="FILE", help="draw the kept tokens to a .png, .pdf or .svg file")
    command.add_argument("--json", action="store_true", help="print JSON")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value that is no JSON is a string."""
    from clustrs import validation

    for setting in settings:
        if setting.startswith("keep="):
            raise ValueError(f"--set {setting}: give --keep {setting.removeprefix('keep=')}")
    return dict(validation.key_value(s, f"--set {s}: give KEY=VALUE, for example tau=2") for s in settings)


def make_method(name: str, keep: str | None, settings: dict[str, Any]) -> "Pruner":
    """A method with these parameters, and a budget unless it is the one that keeps everything."""
    from clustrs import validation
    from clustrs.pruners import get_method

    if keep is not None:
        settings = {"keep": validation.read_keep(keep), **settings}
    elif name != "none":
        settings = {"keep": DEFAULT_KEEP, **settings}
    return get_method(name, **settings)


class Question:
    """What `ask` and `compare` have in common: the options checked, the cheap ones first, and the model loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        from clustrs import validation
        from clustrs.images.corruptions import Corruption
        from clustrs.images.open import open_image
        from clustrs.models import plot as drawing
        from clustrs.models.load import load_model

        self.options = options
        validation.choice("--scope", options.scope, ("image", "crop"))
        validation.choice("--crops", options.crops, ("all", "base"))
        validation.choice("--positions", options.positions, ("compact", "original"))
        validation.integer("--max-new-tokens", options.max_new_tokens, 1)
        if options.show:
            drawing.check_path(options.show)
        self.corruption = Corruption.parse(options.corrupt) if options.corrupt else None
        path = image_path(options.image)
        image = open_image(path)
        self.image: Image.Image = self.corruption.apply(image, path.name, options.seed) if self.corruption else image
        quiet_transformers()
        self.model, self.processor = load_model(options.model)

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
        )

    def seen(self) -> "Image.Image":
        from clustrs.models.ask import as_seen

        return as_seen(self.processor, self.image)

    def title(self, method: str = "") -> str:
        parts = [method, self.options.question, str(self.corruption or "")]
        return " | ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        names = ("image", "question", "model", "scope", "crops", "positions")
        corruption = {**asdict(self.corruption), "seed": self.options.seed} if self.corruption else None
        return {**{name: getattr(self.options, name) for name in names}, "corruption": corruption}


def quiet_transformers() -> None:
    """Keep progress bars and warnings of the loading out of the way of the answer."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
    method = make_method(options.method, options.keep, parse_settings(options.set))
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
        from clustrs.models import plot as drawing

        drawing.draw_kept(question.seen(), answer.image, options.show, question.title(method.name))


def about(model: str) -> str:
    """A line on the model when it is an embedded one."""
    return f"model: {model}, embedded; it knows drawn scenes only (--model for another)\n" if model in EMBEDDED else ""


def run_samples(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([{**asdict(sample), "path": str(sample.path)} for sample in samples()], indent=2))
        return
    for sample in samples():
        print(f"sample:{sample.name}  ({sample.licence})  {sample.path}")
        for question, answer in sample.questions:
            print(f"    {question}  {answer}")


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
        from clustrs.models import plot as drawing

        images = {
            f"{method.name}: {shorten(answer.text, 32, placeholder=' ...')}": answer.image
            for method, answer in zip(methods, answers, strict=True)
        }
        drawing.draw_comparison(question.seen(), images, options.show, question.title())


def compared(options: argparse.Namespace) -> list["Pruner"]:
    """The methods to compare; each takes those of the given parameters that it has."""
    from clustrs.pruners import list_methods, method_class

    every = sorted(list_methods(), key=lambda name: name != "none")  # what the others are compared with comes first
    names = [name.strip() for name in options.methods.split(",")] if options.methods else every
    if len(set(names)) < len(names):
        raise ValueError(f"--methods {options.methods}: give each method once")
    known = {name: {field.name for field in fields(method_class(name))} for name in names}
    settings = parse_settings(options.set)
    for key in settings:
        if not any(key in parameters for parameters in known.values()):
            raise ValueError(f"--set {key}: none of the methods has this parameter, see clustrs methods")
    methods = []
    for name, parameters in known.items():
        mine = {key: value for key, value in settings.items() if key in parameters}
        methods.append(make_method(name, None if name == "none" else options.keep, mine))
    return methods


def table(methods: list["Pruner"], answers: list["Answer"]) -> str:
    """A Markdown table, aligned; the answers come last, because they are long."""
    head = ["method", "tokens", *("decode/token" if part == "decode_per_token" else part for part in PARTS), "answer"]
    rows = [head]
    for method, answer in zip(methods, answers, strict=True):
        times = [milliseconds(getattr(answer.seconds, part)) for part in PARTS]
        text = " ".join(answer.text.split()).replace("|", "\\|")
        rows.append([method.name, f"{answer.visual_tokens}/{answer.unpruned_tokens}", *times, text])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
        lines.append(f"| {' | '.join([row[0].ljust(widths[0]), *numbers, row[-1]])} |")
    rules = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:]), ":-----"]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return "\n".join(lines)


def run_methods(options: argparse.Namespace) -> None:
    listed = [describe(name) for name in method_names()]
    if options.json:
        print(json.dumps(listed, indent=2))
        return
    for method in listed:
        parameters = [
            key if value == "required" else f"{key}={json.dumps(value)}" for key, value in method["parameters"].items()
        ]
        print(f"{method['name']:10} {method['summary']}")
        print(f"{'':10} {', '.join(parameters)}")
        if method["paper"]:
            print(f"{'':10} {method['paper']}")


def method_names() -> list[str]:
    from clustrs.pruners import list_methods

    return list_methods()


def describe(name: str) -> dict[str, Any]:
    """A method's name, what it does, its parameters with defaults ("required" if there is none), its paper."""
    from clustrs.pruners import method_class

    method = method_class(name)
    defaults = {f.name: "required" if f.default is MISSING else f.default for f in fields(method)}
    summary = (method.__doc__ or "").strip().splitlines()[0]
    return {"name": name, "summary": summary, "parameters": defaults, "paper": method.paper}
