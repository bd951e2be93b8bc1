"""`clustrs ask`, `compare`, `corrupt` and `app`: try methods and corruptions on an image."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import Command, app
from clustrs.embedded import DEFAULT, embedded_model, expected_answer, folder_of, image_path
from clustrs.tables import Row, Table, Value

if TYPE_CHECKING:
    from PIL import Image as Images

    from clustrs.models.ask import Answer
    from clustrs.pruners import Pruner

PANEL = "Try"
DEFAULT_KEEP = 16
PARTS = ("vision", "scoring", "selection", "prefill", "decode_per_token")
ASK_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs ask sample:photo-3 "What is at the top right?"         the embedded model, 16 visual tokens chosen by ClustRS
  clustrs ask cat.jpg "What is this?" --model M --keep 0.25      your own model, a quarter of the tokens
  clustrs ask cat.jpg "What is this?" --model M --method none    all of them, for comparison
  clustrs ask cat.jpg "What is this?" --model M --set tau=2 shrink=false
  clustrs ask cat.jpg "What is this?" --model M --corrupt gaussian:0.5 --show kept.png
"""
COMPARE_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs compare sample:photo-3 "What is at the top right?"
  clustrs compare cat.jpg "What is this?" --model M --methods none,clustrs,fastervlm --corrupt salt_pepper:0.2
  clustrs compare cat.jpg "What is this?" --model M --methods none "clustrs clip=0,0.5" clustermeans --keep 16 64
  clustrs compare cat.jpg "What is this?" --model M --show kept.png
separate the values of a list by spaces or commas: --keep 16 64 is --keep 16,64
"""
QuestionText = Annotated[str, typer.Argument(metavar="QUESTION", help="what to ask")]
Show = Annotated[str | None, o.option("draw the kept tokens to a .png, .pdf or .svg file", "FILE")]


@app.command("ask", cls=Command, epilog=ASK_EXAMPLES, rich_help_panel=PANEL)
def ask(
    ctx: typer.Context,
    image: o.Image,
    question: QuestionText,
    model: o.Model = DEFAULT,
    prompt_template: o.Template = "checkpoint",
    image_padding: o.Padding = "checkpoint",
    max_new_tokens: o.NewTokens = 64,
    device: o.Device = None,
    dtype: o.DtypeOption = None,
    attn: o.Attn = None,
    load_in_8bit: o.Load8Bit = False,
    load_in_4bit: o.Load4Bit = False,
    device_map: o.DeviceMap = None,
    method: o.Method = "clustrs",
    keep: o.Keep = None,
    settings: o.Settings = None,
    scope: o.ScopeOption = "image",
    crops: o.CropsOption = "all",
    positions: o.PositionsOption = "compact",
    attention: o.AttentionOption = "plain",
    corrupt: o.Corrupt = None,
    seed: o.Seed = 0,
    show: Show = None,
    json: o.AsJson = False,
) -> None:
    """Ask a question about an image.

    Prints the answer, how many visual tokens the language model read, and the time.
    """
    chosen = o.check_settings(settings)
    budgets = keep or (None,)
    if len(budgets) > 1:
        listed = " ".join(map(str, budgets))
        raise ValueError(f"--keep must be one budget for ask, got {listed} (clustrs compare takes several)")
    asked = Question(ctx.params)
    pruner = make_method(method, budgets[0], chosen)
    asked.load()
    answer = asked.ask(pruner)
    if json:
        base.print_json({**asked.as_json(), **answer_json(pruner, answer)})
    else:
        print_answer(method, answer, asked.expected)
        print_about(model)
    if show:
        from clustrs.models import draw

        draw.draw_kept(asked.seen(), answer.image, show, asked.title(method))
        print(end="" if json else f"drawing: {show}\n")


@app.command("compare", cls=Command, epilog=COMPARE_EXAMPLES, rich_help_panel=PANEL)
def compare(
    ctx: typer.Context,
    image: o.Image,
    question: QuestionText,
    model: o.Model = DEFAULT,
    prompt_template: o.Template = "checkpoint",
    image_padding: o.Padding = "checkpoint",
    max_new_tokens: o.NewTokens = 64,
    device: o.Device = None,
    dtype: o.DtypeOption = None,
    attn: o.Attn = None,
    load_in_8bit: o.Load8Bit = False,
    load_in_4bit: o.Load4Bit = False,
    device_map: o.DeviceMap = None,
    methods: o.Methods = None,
    keep: o.Keep = None,
    settings: o.Settings = None,
    scope: o.ScopeOption = "image",
    crops: o.CropsOption = "all",
    positions: o.PositionsOption = "compact",
    attention: o.AttentionOption = "plain",
    corrupt: o.Corrupt = None,
    seed: o.Seed = 0,
    show: Show = None,
    json: o.AsJson = False,
) -> None:
    """Ask with several methods, side by side.

    Prints a table, times in milliseconds; the model is warmed up before. The total is the time to the whole answer.
    """
    asked = Question(ctx.params)
    pruners = compared(methods or ["all"], keep, settings)
    asked.load()
    asked.ask(pruners[0], max_new_tokens=2)  # the first call pays for what is set up once
    answers = [asked.ask(pruner) for pruner in pruners]
    if json:
        results = [answer_json(pruner, answer) for pruner, answer in zip(pruners, answers, strict=True)]
        base.print_json({**asked.as_json(), "results": results})
    else:
        base.show_table(answers_table(pruners, answers))
        print(end="" if asked.expected is None else f"expected: {asked.expected}\n")
        print_about(model)
    if show:
        from clustrs.models import draw
        from clustrs.pruners import variant_labels

        labels = variant_labels(pruners, with_keep=True)
        panels = {
            f"{label}: {shorten(answer.text, 32, placeholder=' ...')}": answer.image
            for label, answer in zip(labels, answers, strict=True)
        }
        draw.draw_comparison(asked.seen(), panels, show, asked.title())
        print(end="" if json else f"drawing: {show}\n")


def make_method(name: str, keep: float | None, settings: Mapping[str, Any]) -> "Pruner":
    """Return a method with these parameters, and a budget unless it is the one that keeps everything."""
    from clustrs.pruners import get_method

    if keep is None and name != "none":
        keep = DEFAULT_KEEP
    return get_method(name, **({} if keep is None else {"keep": keep}), **settings)


def compared(
    methods: Sequence[str], keep: Sequence[float] | None = None, settings: Mapping[str, Any] | None = None
) -> list["Pruner"]:
    """Return the methods to compare at every budget; each takes those of the given parameters that it has."""
    from clustrs.pruners import list_methods, method_class, parse_method

    given = o.check_settings(settings)
    every = sorted(list_methods(), key=lambda name: name != "none")  # what the others are compared with comes first
    specs = [name for spec in methods for name in (every if spec == "all" else [spec])]
    parsed = [parse_method(spec) for spec in specs]
    known = {one["name"]: {field.name for field in fields(method_class(one["name"]))} for one in parsed}
    for key in given:
        if not any(key in parameters for parameters in known.values()):
            raise ValueError(f"--set {key} is not a parameter of any of these methods (see clustrs methods)")
    pruners: list[Pruner] = []
    for one in parsed:
        name = one.pop("name")
        own = {key: value for key, value in given.items() if key in known[name]} | one
        once = name == "none" or "keep" in own
        budgets: Sequence[float | None] = [own.pop("keep", None)] if once else keep or [None]
        pruners += [make_method(name, budget, own) for budget in budgets]
    for pruner in pruners:
        if pruners.count(pruner) > 1:
            raise ValueError(f"--methods has a duplicate value: {pruner.name}")
    return pruners


class Question:
    """A question about an image. Once `load` has loaded the model, it can be asked.

    What can be checked without torch and transformers is checked at once, so that a mistyped name costs no time.
    """

    model: Any
    processor: Any

    def __init__(self, params: Mapping[str, Any]) -> None:
        from clustrs.corruptions import Corruption
        from clustrs.corruptions.images import open_image

        self.params = params
        folder_of(params["model"])
        self.corruption = Corruption.parse(params["corrupt"]) if params["corrupt"] else None
        path = image_path(params["image"])
        opened = open_image(path)
        self.image: Images.Image = (
            self.corruption.apply(opened, path.name, params["seed"]) if self.corruption else opened
        )
        self.expected = expected_answer(params["image"], params["question"])

    def load(self) -> None:
        """Load the model, and name the words of the question that it does not know."""
        from clustrs.models import draw
        from clustrs.models.ask import name_unknown_words
        from clustrs.models.load import apply_image_padding, load_model, quiet_transformers

        if self.params["show"]:
            draw.check_path(self.params["show"])
            base.check_file("--show", Path(self.params["show"]))
        quiet_transformers()
        with base.status(f"loading {self.params['model']}"):
            self.model, processor = load_model(self.params["model"], o.load_options(self.params))
        self.processor = apply_image_padding(processor, self.params["image_padding"])
        line = name_unknown_words(self.processor, self.params["question"])
        if line:
            print(f"clustrs: {line}: read as unknown, so the answer may mean nothing", file=sys.stderr)

    def ask(self, method: "Pruner", max_new_tokens: int | None = None) -> "Answer":
        """Ask with a method."""
        from clustrs.models.ask import ask

        shared = {name: self.params[name] for name in ("scope", "crops", "positions", "attention", "prompt_template")}
        longest = max_new_tokens or self.params["max_new_tokens"]
        return ask(self.model, self.processor, self.image, self.params["question"], method, longest, **shared)

    def seen(self) -> "Images.Image":
        """Return the image as the model sees it."""
        from clustrs.models.ask import as_seen

        return as_seen(self.processor, self.image)

    def title(self, method: str = "") -> str:
        """Return the title of a drawing."""
        parts = [method, self.params["question"], str(self.corruption or "")]
        return " | ".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        """Describe the question for scripts."""
        shared = ("scope", "crops", "positions", "attention", "prompt_template", "image_padding")
        names = ("image", "question", "model", *shared)
        corruption = {**asdict(self.corruption), "seed": self.params["seed"]} if self.corruption else None
        loaded = o.load_options(self.params).given()
        shown = {"loaded_with": loaded, "corruption": corruption, "drawing": self.params["show"]}
        return {**{name: self.params[name] for name in names}, **shown, "expected": self.expected}


def answer_json(method: "Pruner", answer: "Answer") -> dict[str, Any]:
    """Describe an answer for scripts."""
    return {
        "method": method.to_dict(),
        "answer": answer.text,
        "unpruned_tokens": answer.unpruned_tokens,
        "visual_tokens": answer.visual_tokens,
        "new_tokens": answer.new_tokens,
        "unknown_words": list(answer.unknown_words),
        "seconds": asdict(answer.seconds),
        "kept": answer.image.selection.indices.tolist(),
    }


def print_answer(method: str, answer: "Answer", expected: str | None) -> None:
    """Print the answer, whether it is the expected one where that is known, the counts of tokens, and the times."""
    from clustrs.evaluation.tasks import normalize_answer

    times = [f"{part} {milliseconds(getattr(answer.seconds, part))}" for part in PARTS[:-1]]
    times.append(f"decode {milliseconds(answer.seconds.decode_per_token)} per token")
    print(answer.text)
    if expected is not None:
        right = normalize_answer(answer.text) == normalize_answer(expected)
        print(f"expected: {expected} ({'right' if right else 'wrong'})")
    print(f"\n{method}: kept {answer.visual_tokens} of {answer.unpruned_tokens} visual tokens; ", end="")
    print(f"generated {answer.new_tokens}")
    print(f"milliseconds: {', '.join(times)}")


def answers_table(methods: Sequence["Pruner"], answers: Sequence["Answer"]) -> Table:
    """Build a table with a row per method, times in milliseconds, and the answers last, because they are long.

    The unpruned model selects nothing, so its scoring and selection are neither shown nor part of its total.
    """
    from clustrs.pruners import variant_labels

    rows = []
    for method, label, answer in zip(methods, variant_labels(methods, with_keep=True), answers, strict=True):
        seconds = asdict(answer.seconds)
        if method.name == "none":
            seconds |= {"scoring": None, "selection": None}
        total = sum(seconds[part] or 0 for part in ("vision", "scoring", "selection", "prefill", "decode"))
        times = [milliseconds(seconds[part]) for part in PARTS]
        texts = (f"{answer.visual_tokens}/{answer.unpruned_tokens}", *times, milliseconds(total), answer.text)
        rows.append(Row((label,), tuple(map(Value, texts))))
    names = ["decode ms/token" if part == "decode_per_token" else f"{part} ms" for part in PARTS]
    return Table("", ("method",), ("tokens", *names, "total ms", "answer"), tuple(rows), sentences=True)


def milliseconds(seconds: float | None) -> str:
    """Write seconds as milliseconds."""
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def print_about(model: str) -> None:
    """Print a line on the model when it is an embedded one."""
    embedded = embedded_model(model)
    if embedded is not None:
        print(f"model: {model}, embedded; it knows {embedded.knows} only (--model for another)")


@app.command("corrupt", cls=Command, rich_help_panel=PANEL)
def corrupt(
    image: o.Image,
    output: o.OutputFile,
    corrupt: o.Corrupt = None,
    seed: o.Seed = 0,
    contact_sheet: Annotated[bool, o.flag("draw all corruptions at all levels", "--contact-sheet")] = False,
) -> None:
    """Corrupt an image as an evaluation would, or show all corruptions."""
    from clustrs.corruptions import Corruption
    from clustrs.corruptions import contact_sheet as sheets
    from clustrs.corruptions.images import open_image

    if contact_sheet == bool(corrupt):
        raise ValueError("corrupt needs either --corrupt NAME:LEVEL or --contact-sheet")
    corruption = Corruption.parse(corrupt) if corrupt else None
    base.check_file("--output", output)
    path = image_path(image)
    opened = open_image(path)
    result = corruption.apply(opened, path.name, seed) if corruption else sheets.contact_sheet(opened, path.name, seed)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        result.save(output)
    except (ValueError, OSError) as error:
        raise ValueError(f"--output {str(output)!r}: {getattr(error, 'strerror', None) or error}") from None
    print(output)


@app.command("app", cls=Command, rich_help_panel=PANEL)
def web_page(
    ctx: typer.Context,
    model: o.Model = DEFAULT,
    device: o.Device = None,
    dtype: o.DtypeOption = None,
    attn: o.Attn = None,
    load_in_8bit: o.Load8Bit = False,
    load_in_4bit: o.Load4Bit = False,
    device_map: o.DeviceMap = None,
    runs: Annotated[Path, o.option("the folder whose runs the page shows", "FOLDER")] = Path("runs"),
    host: Annotated[
        str, o.option("address of the server; the default is reached from here only", "HOST")
    ] = "127.0.0.1",
    port: Annotated[int, o.option("port of the server", "PORT", read=o.integer(1, 65535))] = 7860,
    no_browser: Annotated[bool, o.flag("do not open a browser", "--no-browser")] = False,
) -> None:
    """Open a local web page: try methods on an image, look into their clusters, read runs."""
    folder_of(model)  # a mistyped name is refused at once

    from clustrs.app import launch

    launch(model, runs, host, port, browser=not no_browser, load=o.load_options(ctx.params))
