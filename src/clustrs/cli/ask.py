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
from clustrs.validation import LoadOptions

if TYPE_CHECKING:
    from clustrs.models.ask import Answer
    from clustrs.pruners import Pruner

PANEL = "Try"
DEFAULT_KEEP = 16
LOCAL = "127.0.0.1"
SHARED = ("scope", "crops", "positions", "attention", "prompt_template")
PARTS = ("vision", "scoring", "selection", "prefill", "decode_per_token")
SHOWN = ("vision", "selection", "prefill", "decode/token", "total")
ASK_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs ask sample:photo-3 "What is at the top right?"   the embedded model
  clustrs ask cat.jpg "What?" --model M --keep 0.25        a quarter of them
  clustrs ask cat.jpg "What?" --model M --method none      all of them
  clustrs ask cat.jpg "What?" --model M --set tau=2 shrink=false
  clustrs ask cat.jpg "What?" --model M --corrupt gaussian:0.5 --show kept.png
  clustrs ask clip.mp4 "What?" --model M --keep 64         8 frames, one budget
"""
COMPARE_EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs compare sample:photo-3 "What is at the top right?"
  clustrs compare cat.jpg "What?" --model M --corrupt salt_pepper:0.2
  clustrs compare cat.jpg "What?" --model M --methods none "clustrs clip=0,0.5"
  clustrs compare cat.jpg "What?" --model M --keep 16 64 --show kept.png
  clustrs compare clip.mp4 "What?" --model M --methods clustrs evs --keep 64
separate the values of a list by spaces or commas: --keep 16 64 is --keep 16,64
"""


def asking(
    image: o.Image,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="what to ask")],
    keep: o.Keep = None,
    settings: o.Settings = None,
    pruning: o.PruningFile = None,
    model: o.Model = DEFAULT,
    max_new_tokens: Annotated[int, o.option("longest answer", "N", o.MODEL, read=o.integer())] = 64,
    corrupt: o.Corrupt = None,
    seed: o.Seed = 0,
    frames: Annotated[int, o.option("frames that are taken of a video", "N", o.IMAGES, read=o.integer(1, 64))] = 8,
    show: Annotated[
        str | None, o.option("draw the kept tokens to a .png, .pdf or .svg file; of a video also .gif or .mp4", "FILE")
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Options of `ask` and `compare`, for `takes`."""


@app.command("ask", cls=Command, epilog=ASK_EXAMPLES, rich_help_panel=PANEL)
@o.takes(asking, o.attaching, o.prompting, o.loading)
def ask(ctx: typer.Context, method: o.Method = "clustrs", **given: Any) -> None:
    """Ask a question about an image or a video.

    Prints the answer, how many visual tokens the language model read, and the time.
    """
    keep = given["keep"] or (None,)
    if len(keep) > 1:
        given_budgets = " ".join(map(str, keep))
        raise ValueError(f"--keep must be one budget for ask, got {given_budgets} (clustrs compare takes several)")
    asked = Question(given)
    if config := o.read_pruning(ctx, given["pruning"], given["model"]):
        given |= config.options()
        pruner, method = config.method, config.method.name
    else:
        pruner = make_method(method, keep[0], given["settings"])
    asked.load()
    answer = asked.ask(pruner)
    if given["json"]:
        base.print_json({**asked.as_json(), **answer_json(pruner, answer)})
    else:
        from clustrs.evaluation.tasks import normalize_answer

        print(answer.text)
        if asked.expected is not None:
            right = normalize_answer(answer.text) == normalize_answer(asked.expected)
            print(f"expected: {asked.expected} ({'right' if right else 'wrong'})")
        average = answer.image.average
        layers = "" if average is None else f" ({average:.4g} as a mean over layers)"
        counts = f"kept {answer.visual_tokens} of {answer.unpruned_tokens} visual tokens{layers}"
        counts += f"; generated {answer.new_tokens}"
        times = [f"{part} {milliseconds(getattr(answer.seconds, part))}" for part in PARTS[:-1]]
        times.append(f"decode {milliseconds(answer.seconds.decode_per_token)} per token")
        print(f"\n{method}: {counts}\nmilliseconds: {', '.join(times)}")
    asked.finish(list(answer.frames) or answer.image, method)


@app.command("compare", cls=Command, epilog=COMPARE_EXAMPLES, rich_help_panel=PANEL)
@o.takes(asking, o.attaching, o.prompting, o.loading)
def compare(ctx: typer.Context, methods: o.Methods = None, **given: Any) -> None:
    """Ask with several methods, side by side.

    Prints a table, times in milliseconds; the model is warmed up before. Selection includes scoring, the total is the
    time to the whole answer. With --pruning, the configured method and the unpruned model.
    """
    asked = Question(given)
    if config := o.read_pruning(ctx, given["pruning"]):
        given |= config.options()
        pruners = [make_method("none", None, None), config.method]
    else:
        pruners = compared(methods or ["all"], given["keep"], given["settings"])
    asked.load()
    asked.ask(pruners[0], max_new_tokens=2)  # the first call pays for what is set up once
    answers = [asked.ask(pruner) for pruner in pruners]
    if given["json"]:
        base.print_json({**asked.as_json(), "results": list(map(answer_json, pruners, answers))})
    else:
        print_answers(pruners, answers)
        print(end="" if asked.expected is None else f"expected: {asked.expected}\n")
    from clustrs.pruners import variant_labels
    from clustrs.pruners.registry import display_label

    named = zip(variant_labels(pruners, with_keep=True), answers, strict=True)
    kept = {
        f"{display_label(label)}: {shorten(one.text, 32, placeholder=' ...')}": list(one.frames) or one.image
        for label, one in named
    }
    asked.finish(kept)


def make_method(name: str, keep: float | None, settings: Mapping[str, Any] | None) -> "Pruner":
    """Return a method with these parameters, and a budget unless it is the one that keeps everything."""
    from clustrs.pruners import from_dict, parse_method

    budget = {} if keep is None and name == "none" else {"keep": DEFAULT_KEEP if keep is None else keep}
    return from_dict({**budget, **parse_method(name), **(settings or {})})


def compared(
    methods: Sequence[str], keep: Sequence[float] | None = None, settings: Mapping[str, Any] | None = None
) -> list["Pruner"]:
    """Return the methods to compare at every budget; each takes those of the given parameters that it has."""
    from clustrs.evaluation.config import expand_methods
    from clustrs.pruners import from_dict, list_methods, method_class, parse_method

    unused, merged = dict(settings or {}), []
    every = sorted(list_methods("encoder"), key=lambda name: name != "none")  # what others are compared with is first
    for spec in (parse_method(name) for given in methods for name in (every if given == "all" else [given])):
        known = {field.name for field in fields(method_class(spec["name"]))}
        merged.append({**{key: value for key, value in (settings or {}).items() if key in known}, **spec})
        unused = {key: value for key, value in unused.items() if key not in known}
    for key in unused:
        raise ValueError(f"--set {key} is not a parameter of any of these methods (see clustrs methods)")
    return [from_dict(method) for method in expand_methods(merged, keep or [DEFAULT_KEEP])]


class Question:
    """A question about an image or video; what needs no torch and no transformers is checked before `load`."""

    model: Any
    processor: Any
    image: Any

    def __init__(self, given: Mapping[str, Any]) -> None:
        from clustrs.corruptions import Corruption
        from clustrs.corruptions.images import open_image
        from clustrs.corruptions.videos import is_video, open_video

        self.given = given
        folder_of(given["model"])
        self.corruption = Corruption.parse(given["corrupt"]) if given["corrupt"] else None
        path = image_path(given["image"])
        self.video = is_video(path)
        images = open_video(path, given["frames"]) if self.video else [open_image(path)]
        if self.corruption:
            names = [f"{path.name}#{number}" if number else path.name for number in range(len(images))]
            pairs = zip(images, names, strict=True)
            images = [self.corruption.apply(image, name, given["seed"]) for image, name in pairs]
        self.image = images if self.video else images[0]
        self.expected = expected_answer(given["image"], given["question"])
        self.load_options = LoadOptions(**{one.name: given[one.name] for one in fields(LoadOptions)})

    def load(self) -> None:
        """Load the model, and name the words of the question that it does not know."""
        from clustrs.models import draw
        from clustrs.models.ask import name_unknown_words

        if self.given["show"]:
            draw.check_path(self.given["show"], self.video)
            base.check_file("--show", Path(self.given["show"]))
        padding = self.given["image_padding"]
        self.model, self.processor = base.load_model(self.given["model"], self.load_options, padding)
        if line := name_unknown_words(self.processor, self.given["question"]):
            print(f"clustrs: {line}: read as unknown, so the answer may mean nothing", file=sys.stderr)

    def ask(self, method: "Pruner", max_new_tokens: int | None = None) -> "Answer":
        from clustrs.models.ask import ask

        longest = max_new_tokens or self.given["max_new_tokens"]
        shared = {name: self.given[name] for name in (*SHARED, "deepstack") if name in self.given}
        return ask(self.model, self.processor, self.image, self.given["question"], method, longest, **shared)

    def finish(self, kept: Any, method: str = "") -> None:
        """Say what an embedded model knows, and draw the tokens that were kept, by label where there are several."""
        from clustrs.models import draw
        from clustrs.models.ask import as_seen

        embedded, show, json = embedded_model(self.given["model"]), self.given["show"], self.given["json"]
        if embedded is not None and not json:
            print(f"model: {embedded.name}, embedded; it knows {embedded.knows} only (--model for another)")
        if show:
            title = " | ".join(filter(None, [method, self.given["question"], str(self.corruption or "")]))
            if self.video:
                frames = [as_seen(self.processor, frame) for frame in self.image]
                draw.draw_frames(frames, kept, show, title)
            else:
                draw_all = draw.draw_comparison if isinstance(kept, dict) else draw.draw_kept
                draw_all(as_seen(self.processor, self.image), kept, show, title)
            print(end="" if json else f"drawing: {show}\n")

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: self.given[name] for name in ("image", "question", "model", *SHARED, "image_padding")},
            "loaded_with": self.load_options.given(),
            "corruption": {**asdict(self.corruption), "seed": self.given["seed"]} if self.corruption else None,
            "drawing": self.given["show"],
            "expected": self.expected,
        }


def answer_json(method: "Pruner", answer: "Answer") -> dict[str, Any]:
    return {
        "method": method.to_dict(),
        "answer": answer.text,
        **{name: getattr(answer, name) for name in ("unpruned_tokens", "visual_tokens", "new_tokens", "unknown_words")},
        "seconds": asdict(answer.seconds),
        "average_tokens": answer.image.average,
        "kept": [one.selection.indices.tolist() for one in answer.frames] or answer.image.selection.indices.tolist(),
    }


def answers_table(methods: Sequence["Pruner"], answers: Sequence["Answer"]) -> tuple[list[str], list[list[str]]]:
    """Return headings and a row per method, times in milliseconds; those below the unpruned model say how much faster.

    It has no selection."""
    from clustrs.pruners import variant_labels

    whole, rows = None, []
    for method, label, answer in zip(methods, variant_labels(methods, with_keep=True), answers, strict=True):
        spent = answer.seconds
        selection = None if method.name == "none" else spent.scoring + spent.selection
        total = sum(part or 0 for part in (spent.vision, selection, spent.prefill, spent.decode))
        whole = total if method.name == "none" else whole
        times = [milliseconds(one) for one in (spent.vision, selection, spent.prefill, spent.decode_per_token, total)]
        faster = "-" if whole is None or not total else f"{whole / total:.2f}"
        rows.append([label, f"{answer.visual_tokens}/{answer.unpruned_tokens}", *times, faster, answer.text])
    return ["method", "tokens", *(f"{name} ms" for name in SHOWN), "x faster", "answer"], rows


def print_answers(methods: Sequence["Pruner"], answers: Sequence["Answer"]) -> None:
    heads, rows = answers_table(methods, answers)
    if base.is_rich(sys.stdout):  # answers are long: they have a table of their own
        base.print_table(heads[:-1], [row[:-1] for row in rows], heads[1:])
        heads, rows = heads[:1] + heads[-1:], [row[:1] + row[-1:] for row in rows]
    base.print_table(heads, rows, heads[1:-1])


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


@app.command("corrupt", cls=Command, rich_help_panel=PANEL)
def corrupt(
    image: o.Image,
    output: Annotated[Path, o.option("the file to write", "FILE", None, "-o", "--output")],
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
@o.takes(o.loading)
def web_page(
    ctx: typer.Context,
    model: o.Model = DEFAULT,
    pruning: o.PruningFile = None,
    runs: Annotated[Path, o.option("the folder whose runs the page shows", "FOLDER")] = Path("runs"),
    host: Annotated[str, o.option("address of the server; the default is reached from here only", "HOST")] = LOCAL,
    port: Annotated[int, o.option("port of the server", "PORT", read=o.integer(1, 65535))] = 7860,
    no_browser: Annotated[bool, o.flag("do not open a browser", "--no-browser")] = False,
    **given: Any,
) -> None:
    """Open a local web page: try methods on an image, look into their clusters, read runs."""
    folder_of(model)  # a mistyped name is refused at once
    config = o.read_pruning(ctx, pruning, model)

    from clustrs.app import launch

    launch(model, runs, host, port, browser=not no_browser, load=LoadOptions(**given), pruning=config)
