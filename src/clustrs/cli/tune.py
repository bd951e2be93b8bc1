"""`clustrs tune`: choose a method and a budget on a user's images."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import Command, app
from clustrs.embedded import DEFAULT, folder_of
from clustrs.validation import Attention, LoadOptions, Positions, excerpt

EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs tune --model M --images photos --questions questions.txt --target 0.97 --minutes 10
  clustrs tune --model M --questions questions.jsonl --methods clustermeans divprune --keep 16 64 144
Stopped or killed, the same command resumes.
"""
IMAGES = "a folder of images; what cannot be read is left out and counted"
QUESTIONS = "a .txt file, a question a line, asked about every image; or .jsonl, each line with an image and a question"
TARGET = "share of the unpruned model's answers that must stay the same"
MEASURE = "agreement of answers (without case and full stop), exact, or of single tokens"
OUTPUT = "the folder for measurements and results (default: runs/tune-MODEL)"
Measure = Annotated[str, o.option(MEASURE, "agreement|exact|tokens")]


@app.command("tune", cls=Command, epilog=EXAMPLES, rich_help_panel="Measure")
@o.takes(o.prompting, o.loading)
def tune(
    model: o.Model = DEFAULT,
    images: Annotated[Path | None, o.option(IMAGES, "FOLDER", o.IMAGES)] = None,
    questions: Annotated[Path | None, o.option(QUESTIONS, "FILE", o.QUESTIONS)] = None,
    target: Annotated[float, o.option(TARGET, "SHARE")] = 0.97,
    measure: Measure = "agreement",
    minutes: Annotated[float | None, o.option("stop after this time, with what is there", "MINUTES")] = None,
    methods: o.Methods = None,
    keep: Annotated[
        Sequence[float] | None, o.option("budgets to try", "K...", o.PRUNING, read=o.several(o.read_keep))
    ] = None,
    positions: Annotated[
        Sequence[str], o.option("positions to try", "P...", o.PRUNING, read=o.several(o.one_of(Positions)))
    ] = ("auto",),
    attention: Annotated[
        Sequence[str], o.option("attention to try", "A...", o.PRUNING, read=o.several(o.one_of(Attention)))
    ] = ("auto",),
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
    if not 0 < target <= 1:
        raise ValueError(f"--target must be a number above 0, at most 1, got {target:g}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be a number above 0, got {minutes:g}")
    folder_of(model)
    folder = output or Path("runs") / f"tune-{Path(model).name[:60]}"
    base.check_folder("--output", folder)
    from clustrs.evaluation import tuning
    from clustrs.models.load import apply_image_padding, load_model, quiet_transformers

    sources, asked = read_questions(images, questions)
    quiet_transformers()
    with base.status(f"loading {model}"):
        loaded, processor = load_model(model, LoadOptions(**{one.name: given[one.name] for one in fields(LoadOptions)}))
    result = tuning.tune(
        loaded,
        apply_image_padding(processor, given["image_padding"]),
        sources,
        asked,
        target=target,
        measure=measure,  # type: ignore[arg-type]
        methods=methods,
        keep=keep or tuning.KEEPS,
        positions=positions,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        corrupt=corrupt,
        seed=seed,
        max_new_tokens=max_new_tokens,
        prompt_template=given["prompt_template"],
        minutes=minutes,
        output=folder,
        progress=not quiet,
    )
    print(result.table().terminal(base.width()))
    for line in result.problems():
        base.say(f"clustrs: {line}")
    print(f"\n{result.sentence()}\nreport: {folder / 'tune.html'}")
    print(f"configuration: {folder / 'pruning.json'}" if result.recommended else "no pruning.json was written")


def read_questions(images: Path | None, questions: Path | None) -> tuple[Any, Any]:
    """Return images and questions as `clustrs.tune` takes them."""
    from clustrs.evaluation.tasks import parse_json, read_text

    if questions is None or questions.suffix.lower() != ".jsonl":
        if images is None:
            raise ValueError("tune needs --images FOLDER, or --questions FILE.jsonl with an image in each line")
        lines = None if questions is None else [one.strip() for one in read_text(questions).splitlines() if one.strip()]
        if lines == []:
            raise ValueError(f"--questions {str(questions)!r}: there is no question in it")
        return images, lines
    folder, asked = images or questions.parent, dict[str, list[str]]()
    for number, line in enumerate(read_text(questions).split("\n"), 1):
        where = f"{str(questions)!r} line {number}"
        entry = parse_json(line, where) if line.strip() else None
        if entry is None:
            continue
        pair = [entry.get(name) for name in ("image", "question")] if isinstance(entry, dict) else [None]
        if not all(isinstance(one, str) for one in pair):
            raise ValueError(f"{where}: expected an object with image and question, both text, got {excerpt(entry)}")
        asked.setdefault(str(pair[0]), []).append(str(pair[1]))
    if not asked:
        raise ValueError(f"--questions {str(questions)!r}: there is no question in it")
    return [folder / name for name in asked], list(asked.values())
