"""`clustrs tune`: choose a method and a budget on a user's images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import Command, app
from clustrs.embedded import DEFAULT, folder_of
from clustrs.validation import Attention, LoadOptions, Positions, parse_json, read_text

EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs tune --model M --images photos --questions questions.txt --minutes 10
  clustrs tune --model M --questions mine.jsonl --methods divprune --keep 16 64
Stopped or killed, the same command resumes.
"""
IMAGES = "a folder of images; what cannot be read is left out and counted"
QUESTIONS = "a .txt file, a question a line, asked about every image; or .jsonl, each line with an image and a question"
TARGET = "share of the unpruned model's answers that must stay the same"
MEASURE = "agreement of answers (without case and full stop), exact, or of single tokens"
OUTPUT = "the folder for measurements and results (default: runs/tune-MODEL)"
KEEP = "budgets to try (default: 0.5 to 0.03125)"
Measure = Literal["agreement", "exact", "tokens"]
# options that are arguments of `clustrs.tune`, with its defaults
SEARCH = {"target", "measure", "minutes", "methods", "keep", "positions", "attention", "corrupt", "seed"}
SEARCH |= {"max_new_tokens", "prompt_template"}


def tried(name: str, kind: Any) -> Any:
    return o.option(f"{name} to try (default: auto)", "NAME...", o.PRUNING, read=o.several(o.one_of(kind)))


@app.command("tune", cls=Command, epilog=EXAMPLES, rich_help_panel="Measure")
@o.takes(o.prompting, o.loading)
def tune(
    ctx: typer.Context,
    model: o.Model = DEFAULT,
    images: Annotated[Path | None, o.option(IMAGES, "FOLDER", o.IMAGES)] = None,
    questions: Annotated[Path | None, o.option(QUESTIONS, "FILE", o.QUESTIONS)] = None,
    target: Annotated[float, o.option(TARGET, "SHARE")] = 0.97,
    measure: Annotated[Measure, o.option(MEASURE, choices=Measure)] = "agreement",
    minutes: Annotated[float | None, o.option("stop after this time, with what is there", "MINUTES")] = None,
    methods: o.Methods = None,
    keep: Annotated[Sequence[float] | None, o.option(KEEP, "K...", o.PRUNING, read=o.several(o.read_keep))] = None,
    positions: Annotated[Sequence[Positions] | None, tried("positions", Positions)] = None,
    attention: Annotated[Sequence[Attention] | None, tried("attention", Attention)] = None,
    corrupt: o.Corrupt = None,
    seed: o.Seed = 0,
    max_new_tokens: Annotated[int, o.option("longest answer", "N", o.MODEL, read=o.integer())] = 32,
    output: Annotated[Path | None, o.option(OUTPUT, "FOLDER", None, "-o", "--output")] = None,
    quiet: Annotated[bool, o.flag("no progress bar", "--quiet")] = False,
    **given: Any,
) -> None:
    """Find the method and the smallest budget with which a model still answers as it does unpruned.

    Needs no labels. Prints a table and a recommendation, and writes tune.html, tune.md and pruning.json.
    """
    folder_of(model)
    folder = output or Path("runs") / f"tune-{Path(model).name[:60]}"
    base.check_folder("--output", folder)
    from clustrs.evaluation import tuning

    tuning.check_limits(target, minutes)
    sources, asked = read_questions(images, questions)
    padding, _ = given.pop("image_padding"), given.pop("prompt_template")
    loaded, processor = base.load_model(model, LoadOptions(**given), padding)
    chosen = {name: value for name, value in base.given_options(ctx).items() if name in SEARCH}
    result = tuning.tune(loaded, processor, sources, asked, **chosen, output=folder, progress=not quiet)
    print(result.table().terminal(base.width()))
    for line in result.problems():
        base.say(f"clustrs: {line}")
    print(f"\n{result.sentence()}\nreport: {folder / 'tune.html'}")
    print(f"configuration: {folder / 'pruning.json'}" if result.recommended else "no pruning.json was written")


def read_questions(images: Path | None, questions: Path | None) -> tuple[Any, Any]:
    """Return images and questions as `clustrs.tune` takes them."""
    from clustrs.evaluation.tasks.custom import Entry

    pairs = questions is not None and questions.suffix.lower() == ".jsonl"
    if images is None and not pairs:
        raise ValueError("tune needs --images FOLDER, or --questions FILE.jsonl with an image in each line")
    if questions is None:
        return images, None
    lines = [(n, line.strip()) for n, line in enumerate(read_text(questions).split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"--questions {str(questions)!r}: there is no question in it")
    if not pairs:
        return images, [line for _, line in lines]
    asked = dict[Path, list[str]]()
    for number, line in lines:
        where = f"{str(questions)!r} line {number}"
        entry = Entry(where, parse_json(line, where))
        asked.setdefault((images or questions.parent) / entry.text("image"), []).append(entry.text("question"))
    return list(asked), list(asked.values())
