"""`clustrs compare`: one question about one image, with several methods side by side."""

from dataclasses import asdict, dataclass, fields
from textwrap import shorten
from typing import TYPE_CHECKING

from clustrs.cli import terminal
from clustrs.cli.arguments import option
from clustrs.cli.commands import command
from clustrs.cli.question import (
    PARTS,
    Question,
    QuestionOptions,
    answer_json,
    check_settings,
    make_method,
    milliseconds,
    print_about,
)
from clustrs.tables import Row, Table, Value

if TYPE_CHECKING:
    from clustrs.models.ask import Answer
    from clustrs.pruners import Pruner

EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs compare sample:photo-3 "What is at the top right?"
  clustrs compare cat.jpg "What is this?" --model M --methods none,clustrs,fastervlm --corrupt salt_pepper:0.2
  clustrs compare cat.jpg "What is this?" --model M --methods none "clustrs tau=2" clustrs --keep 16 64
  clustrs compare cat.jpg "What is this?" --model M --show kept.png
lists are given with spaces or commas: --keep 16 64 is --keep 16,64
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(QuestionOptions):
    """The options of `clustrs compare`."""

    methods: tuple[str, ...] = option(
        ("all",), 'methods, see clustrs methods; parameters may follow ("clustrs tau=2")', metavar="METHOD"
    )


@command("compare", panel="Try", examples=EXAMPLES)
def run_compare(options: CompareOptions) -> None:
    """Ask with several methods, side by side.

    Prints a table, times in milliseconds; the model is warmed up before. The total is the time to the whole answer.
    """
    question = Question(options)
    methods = compared(options)
    question.load()
    question.ask(methods[0], max_new_tokens=2)  # the first call pays for what is set up once
    answers = [question.ask(method) for method in methods]
    if options.json:
        results = [answer_json(method, answer) for method, answer in zip(methods, answers, strict=True)]
        terminal.print_json({**question.as_json(), "results": results})
    else:
        terminal.show_table(answers_table(methods, answers))
        print(end="" if question.expected is None else f"expected: {question.expected}\n")
        print_about(options.model)
    if options.show:
        from clustrs.models import draw

        panels = {
            f"{label}: {shorten(answer.text, 32, placeholder=' ...')}": answer.image
            for label, answer in zip(labels(methods), answers, strict=True)
        }
        draw.draw_comparison(question.seen(), panels, options.show, question.title())
        print(end="" if options.json else f"drawing: {options.show}\n")


def compared(options: CompareOptions) -> list["Pruner"]:
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
    """The names of methods, with what tells variants of one apart."""
    from clustrs.pruners import variant_labels

    return variant_labels(methods, with_keep=True)


def answers_table(methods: list["Pruner"], answers: list["Answer"]) -> Table:
    """Build a table with a row per method, times in milliseconds, and the answers last, because they are long.

    The unpruned model selects nothing, so its scoring and selection are neither shown nor part of its total.
    """
    rows = []
    for method, label, answer in zip(methods, labels(methods), answers, strict=True):
        seconds = asdict(answer.seconds)
        if method.name == "none":
            seconds |= {"scoring": None, "selection": None}
        total = sum(seconds[part] or 0 for part in ("vision", "scoring", "selection", "prefill", "decode"))
        times = [milliseconds(seconds[part]) for part in PARTS]
        texts = (f"{answer.visual_tokens}/{answer.unpruned_tokens}", *times, milliseconds(total), answer.text)
        rows.append(Row((label,), tuple(map(Value, texts))))
    names = ["decode ms/token" if part == "decode_per_token" else f"{part} ms" for part in PARTS]
    return Table("", ("method",), ("tokens", *names, "total ms", "answer"), tuple(rows), sentences=True)
