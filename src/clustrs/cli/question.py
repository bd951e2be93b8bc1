"""What `clustrs ask` and `clustrs compare` have in common: a question about an image, and a loaded model."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustrs.cli import terminal, values
from clustrs.cli.arguments import option, positional
from clustrs.cli.options import AttachOptions, ModelOptions, PromptOptions
from clustrs.cli.outputs import check_file
from clustrs.embedded import embedded_model, expected_answer, folder_of, image_path

if TYPE_CHECKING:
    from PIL import Image

    from clustrs.models.ask import Answer
    from clustrs.pruners import Pruner

DEFAULT_KEEP = 16
PARTS = ("vision", "scoring", "selection", "prefill", "decode_per_token")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(PromptOptions, AttachOptions, ModelOptions):
    """The options that `ask` and `compare` share."""

    image: str = positional("an image file, or sample:NAME (see clustrs samples)", "IMAGE")
    question: str = positional("what to ask", "QUESTION")
    keep: tuple[int | float, ...] | None = option(
        None,
        f"a count (16) or a fraction (0.25; 1.0 is all); compare takes several (default: {DEFAULT_KEEP})",
        metavar="K",
    )
    set: dict[str, Any] = option({}, "parameters of the method, see clustrs methods", metavar="KEY=VALUE")
    corrupt: str | None = option(
        None, "corrupt the image first, for example gaussian:0.5; see clustrs corruptions", metavar="NAME:LEVEL"
    )
    seed: int = option(0, "seed of the corruption", low=0, high=values.LARGEST_SEED)
    max_new_tokens: int = option(64, "longest answer", metavar="N")
    show: str | None = option(None, "draw the kept tokens to a .png, .pdf or .svg file", metavar="FILE")
    json: bool = option(False, "print JSON")


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


class Question:
    """A question about an image. Once `load` has loaded the model, it can be asked.

    What can be checked without torch and transformers is checked before, so that a mistyped name is told at once.
    """

    model: Any
    processor: Any

    def __init__(self, options: QuestionOptions) -> None:
        from clustrs.corruptions import Corruption
        from clustrs.corruptions.images import open_image

        self.options = options
        folder_of(options.model)
        self.corruption = Corruption.parse(options.corrupt) if options.corrupt else None
        path = image_path(options.image)
        image = open_image(path)
        self.image: Image.Image = self.corruption.apply(image, path.name, options.seed) if self.corruption else image
        self.expected = expected_answer(options.image, options.question)

    def load(self) -> None:
        """Load the model."""
        from clustrs.models import draw
        from clustrs.models.load import apply_image_padding, load_model, quiet_transformers

        options = self.options
        if options.show:
            draw.check_path(options.show)
            check_file("--show", Path(options.show))
        quiet_transformers()
        with terminal.status(f"loading {options.model}"):
            self.model, processor = load_model(options.model, options.load_options())
        self.processor = apply_image_padding(processor, options.image_padding)
        warn_unknown_words(self.processor, options.question)

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
        shown = {"loaded_with": self.options.given(), "corruption": corruption, "drawing": self.options.show}
        return {**given, **shown, "expected": self.expected}


def answer_json(method: "Pruner", answer: "Answer") -> dict[str, Any]:
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


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def print_about(model: str) -> None:
    """Print a line on the model when it is an embedded one."""
    embedded = embedded_model(model)
    if embedded is not None:
        print(f"model: {model}, embedded; it knows {embedded.knows} only (--model for another)")


def warn_unknown_words(processor: Any, question: str) -> None:
    """Print a line to standard error that names the words of a question that the model does not know."""
    from clustrs.models.ask import name_unknown_words

    line = name_unknown_words(processor, question)
    if line:
        print(f"clustrs: {line}: read as unknown, so the answer may mean nothing", file=sys.stderr)
