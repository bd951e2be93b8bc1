"""`clustrs ask`: one question about one image."""

from dataclasses import dataclass
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

if TYPE_CHECKING:
    from clustrs.models.ask import Answer

EXAMPLES = """\
examples (M stands for a folder or a Hugging Face id):
  clustrs ask sample:photo-3 "What is at the top right?"         the embedded model, 16 visual tokens chosen by ClustRS
  clustrs ask cat.jpg "What is this?" --model M --keep 0.25      a model of yours, a quarter of the tokens
  clustrs ask cat.jpg "What is this?" --model M --method none    all of them, for comparison
  clustrs ask cat.jpg "What is this?" --model M --set tau=2 --set shrink=false
  clustrs ask cat.jpg "What is this?" --model M --corrupt gaussian:0.5 --show kept.png
"""


@dataclass(frozen=True, kw_only=True)
class AskOptions(QuestionOptions):
    """The options of `clustrs ask`."""

    method: str = option("clustrs", "how to choose the tokens", metavar="METHOD")


@command("ask", panel="Try", examples=EXAMPLES)
def run_ask(options: AskOptions) -> None:
    """Ask a question about an image.

    Prints the answer, how many visual tokens the language model read, and the time.
    """
    check_settings(options.set)
    budgets = options.keep or (None,)
    if len(budgets) > 1:
        shown = " ".join(map(str, budgets))
        raise ValueError(f"--keep {shown}: ask takes one budget, clustrs compare takes several")
    question = Question(options)
    method = make_method(options.method, budgets[0], options.set)
    question.load()
    answer = question.ask(method)
    if options.json:
        terminal.print_json({**question.as_json(), **answer_json(method, answer)})
    else:
        print_answer(method.name, answer, question.expected)
        print_about(options.model)
    if options.show:
        from clustrs.models import draw

        draw.draw_kept(question.seen(), answer.image, options.show, question.title(method.name))
        print(end="" if options.json else f"drawing: {options.show}\n")


def print_answer(method: str, answer: "Answer", expected: str | None) -> None:
    """Print the answer, whether it is the expected one where that is known, the counts of tokens, and where the time
    went."""
    from clustrs.evaluation.tasks import normalize_answer

    times = [f"{part} {milliseconds(getattr(answer.seconds, part))}" for part in PARTS[:-1]]
    times.append(f"decode {milliseconds(answer.seconds.decode_per_token)} a token")
    print(answer.text)
    if expected is not None:
        right = normalize_answer(answer.text) == normalize_answer(expected)
        print(f"expected: {expected} ({'right' if right else 'wrong'})")
    print(f"\n{method}: {answer.visual_tokens} of {answer.unpruned_tokens} visual tokens went in, ", end="")
    print(f"{answer.new_tokens} new tokens came out")
    print(f"milliseconds: {', '.join(times)}")
