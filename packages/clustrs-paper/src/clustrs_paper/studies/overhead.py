"""Visual overhead: what the vision tower, scoring and selection take of an answer, for each method and budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Literal

from clustrs import palette
from clustrs.pruners.registry import display_label
from clustrs_paper.studies.result import StudyResult, pyplot, single
from clustrs_paper.studies.settings import ImageStudyConfig, Keep, resolve_methods, setting

if TYPE_CHECKING:
    import torch

    from clustrs.pruners import Pruner
    from clustrs_paper.studies.images import StudyImage

QUESTION = "What is this?"
PARTS = dict(zip(("vision", "scoring", "selection"), palette.SERIES, strict=False))
"""Stages of the overhead with their colors; "vision" is the tower and the projector."""
ANSWER_COLORS = ("#b0b0b0", "#606060", *palette.SERIES[2:])
PAPER_MACHINE = "A100"
LONGEST_ANSWER = 100_000
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OverheadConfig(ImageStudyConfig):
    """Settings of the study: methods, budgets, lengths of an answer, and repetitions."""

    methods: tuple[str, ...] = ("none", "fastervlm", "divprune", "visionzip", "clustrs")
    keep: tuple[Keep, ...] = (16, 144)
    new_tokens: tuple[int, ...] = setting((14, 64), high=LONGEST_ANSWER)
    repeats: int = 10
    crops: Literal["all", "base"] = "all"


def run(config: OverheadConfig) -> StudyResult:
    """Time answers of every method in turn."""
    from tqdm import tqdm

    from clustrs.evaluation.bench import describe_machine
    from clustrs.models.load import apply_image_padding, load_model
    from clustrs_paper.studies.images import study_images

    contestants = [Contestant(*pair) for pair in resolve_methods(config.methods, config.keep)]
    lengths = sorted(config.new_tokens)
    images = study_images(config)
    model, processor = load_model(config.model, config.load_options())
    processor = apply_image_padding(processor, config.image_padding)
    total = (config.repeats + 1) * len(contestants)
    with tqdm(total=total, desc="overhead", unit="answer", disable=not config.progress) as bar:
        timings = measure(model, processor, images, contestants, config, lambda: bar.update())
    rows = summarize(contestants, timings, lengths, config.model)
    return single("overhead", draw(rows, lengths, config.model), rows, findings(rows, lengths, describe_machine(model)))


@dataclass(frozen=True)
class Contestant:
    """A method with its budget, and how tables call it."""

    label: str
    method: "Pruner"

    @property
    def keep(self) -> Keep | str:
        return "all" if self.method.name == "none" else self.method.keep


@dataclass(frozen=True)
class Timing:
    """Seconds of one answer by part, and from its beginning to each of the new tokens."""

    vision: float
    scoring: float
    selection: float
    tokens: tuple[float, ...]

    @property
    def overhead(self) -> float:
        return self.vision + self.scoring + self.selection


def measure(
    model: Any,
    processor: Any,
    images: "Sequence[StudyImage]",
    contestants: Sequence[Contestant],
    config: OverheadConfig,
    advance: Callable[[], Any],
) -> list[list[Timing]]:
    """The timings of each method. They take turns, beginning with another one in every round, so that what slows the
    machine down hits all alike. The first round warms up and does not count; each round has the next image."""
    from clustrs.models.ask import chat_prompt

    text = chat_prompt(processor, QUESTION, config.prompt_template)
    timings: list[list[Timing]] = [[] for _ in contestants]
    for turn in range(config.repeats + 1):
        image = images[turn % len(images)].image
        inputs = processor(images=[image], text=[text], return_tensors="pt").to(model.device, model.dtype)
        for position in range(len(contestants)):
            index = (position + turn) % len(contestants)
            timing = answer(model, inputs, contestants[index].method, max(config.new_tokens), config.crops)
            if turn:
                timings[index].append(timing)
            advance()
    return timings


def answer(model: Any, inputs: Mapping[str, Any], method: "Pruner", length: int, crops: str) -> Timing:
    """One answer of exactly `length` tokens. An unpruned model neither scores nor selects: that is taken out."""
    import torch
    from transformers import StoppingCriteriaList

    from clustrs.models.scoring import now, timing

    stamps: list[float] = []

    def stamp(ids: "torch.Tensor", *_: Any, **__: Any) -> "torch.Tensor":
        stamps.append(now(model.device))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with method(model, crops=crops, positions="compact", attention="plain") as handle, timing(), torch.inference_mode():
        start = now(model.device)
        model.generate(
            **inputs,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
        seconds = dict(handle.seconds)
    if method.name == "none":
        start += seconds["scoring"] + seconds["selection"]
        seconds |= {"scoring": 0.0, "selection": 0.0}
    return Timing(**seconds, tokens=tuple(moment - start for moment in stamps))


def summarize(
    contestants: Sequence[Contestant], timings: Sequence[Sequence[Timing]], lengths: Sequence[int], model: str
) -> list[Row]:
    """Medians over the runs in milliseconds. The overhead is the sum of its parts' medians, so that they add up; its
    quartiles are those of whole runs. Shares are of the overhead, and the overhead's of an answer of some length."""
    printed = paper_overhead(model)
    rows = []
    for contestant, runs in zip(contestants, timings, strict=True):
        parts = {part: 1e3 * median(getattr(run, part) for run in runs) for part in PARTS}
        overhead = sum(parts.values())
        totals = [1e3 * run.overhead for run in runs]
        low, _, high = quantiles(totals, n=4, method="inclusive") if len(runs) > 1 else totals * 3
        first = 1e3 * median(run.tokens[0] for run in runs)
        row: Row = {"method": contestant.label, "keep": contestant.keep, "runs": len(runs)}
        row |= {f"{part}_ms": value for part, value in parts.items()}
        row |= {"overhead_ms": overhead, "overhead_quartile_1_ms": low, "overhead_quartile_3_ms": high}
        row |= {f"{part}_share": value / overhead for part, value in parts.items()}
        row["first_token_ms"] = first
        for length in lengths:
            whole = 1e3 * median(run.tokens[length - 1] for run in runs)
            row |= {f"answer_{length}_ms": whole, f"share_of_answer_{length}": overhead / whole}
        bounds = printed.get((contestant.label, contestant.keep), (None, None))
        row |= {"paper_lowest_ms": bounds[0], "paper_highest_ms": bounds[1]}
        rows.append(row)
    return rows


def paper_overhead(model: str) -> dict[tuple[str, Keep | str], tuple[float, float]]:
    """The lowest and highest overhead that the paper prints, by method and budget; nothing for other models."""
    from clustrs_paper.tables import paper_model, paper_table

    cells: dict[tuple[str, Keep | str], dict[str, float]] = {}
    for cell in paper_table("overhead"):
        if cell.model == paper_model(model) and cell.keep is not None:
            cells.setdefault((cell.method, cell.keep), {})[cell.metric] = cell.value
    return {key: (values["lowest_overhead"], values["highest_overhead"]) for key, values in cells.items()}


def name_of(row: Mapping[str, Any]) -> str:
    name = display_label(row["method"])
    return name if row["keep"] == "all" else f"{name}, k = {row['keep']}"


def draw(rows: Sequence[Row], lengths: Sequence[int], model: str) -> Any:
    """Stacked bars of the overhead on the left, its share of an answer on the right."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.9 + 0.42 * len(rows)), layout="constrained", width_ratios=(3, 2), sharey=True
    )
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    _draw_parts(left, rows)
    _draw_paper(left, rows)
    left.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    left.invert_yaxis()
    left.set(title="visual overhead", xlabel="milliseconds (median)")
    _draw_shares(right, rows, lengths)
    below = -0.6 / (0.42 * len(rows) + 0.3)
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=5, frameon=False)
    figure.suptitle(model, fontsize=11, parse_math=False)
    return figure


def _draw_parts(axis: Any, rows: Sequence[Row]) -> None:
    """The parts of the overhead on top of each other, with its quartiles."""
    y = range(len(rows))
    start = [0.0] * len(rows)
    for part, color in PARTS.items():
        widths = [row[f"{part}_ms"] for row in rows]
        axis.barh(y, widths, left=start, color=color, label=part, height=0.7)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    errors = [
        [max(0.0, row["overhead_ms"] - row["overhead_quartile_1_ms"]) for row in rows],
        [max(0.0, row["overhead_quartile_3_ms"] - row["overhead_ms"]) for row in rows],
    ]
    axis.errorbar(start, y, xerr=errors, fmt="none", ecolor="black", capsize=3, linewidth=1, label="quartiles")
    for i, row in enumerate(rows):
        text, end = f"{row['overhead_ms']:.1f} ms", max(row["overhead_ms"], row["overhead_quartile_3_ms"])
        axis.annotate(text, (end, i), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axis.margins(x=0.16)


def _draw_paper(axis: Any, rows: Sequence[Row]) -> None:
    """The range that the paper prints, where it has one."""
    printed = [(i, row["paper_lowest_ms"], row["paper_highest_ms"]) for i, row in enumerate(rows)]
    known = [(i, low, high) for i, low, high in printed if low is not None]
    if known:
        axis.errorbar(
            [(low + high) / 2 for _, low, high in known],
            [i for i, _, _ in known],
            xerr=[(high - low) / 2 for _, low, high in known],
            fmt="D",
            color="black",
            markerfacecolor="white",
            capsize=5,
            label=f"paper ({PAPER_MACHINE})",
        )


def _draw_shares(axis: Any, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """The overhead as a share of answers of several lengths."""
    height = 0.8 / len(lengths)
    for i, length in enumerate(lengths):
        shares = [100 * row[f"share_of_answer_{length}"] for row in rows]
        at = [y + (i - (len(lengths) - 1) / 2) * height for y in range(len(rows))]
        color = ANSWER_COLORS[i % len(ANSWER_COLORS)]
        axis.barh(at, shares, height=0.92 * height, color=color, label=f"{length} tokens")
        for y, share in zip(at, shares, strict=True):
            axis.annotate(f"{share:.1f}", (share, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.margins(x=0.14)
    axis.set(title="share of the whole answer", xlabel="per cent")


def findings(rows: Sequence[Row], lengths: Sequence[int], where: str) -> str:
    """Compare the methods at each budget. The tower's work is the same for all: they are ranked by the rest."""
    lines = [
        f"Median of {rows[0]['runs']} runs on {where}. Overhead is the vision tower and, in brackets, what a method "
        "adds to it: scoring and selection."
    ]
    alone = next((row for row in rows if row["keep"] == "all"), None)
    for keep in dict.fromkeys(row["keep"] for row in rows if row["keep"] != "all"):
        here = sorted((row for row in rows if row["keep"] == keep), key=added)
        listed = [f"{row['method']} {row['overhead_ms']:.1f} ({added(row):.1f})" for row in here]
        lines.append(f"k = {keep}, milliseconds: {', '.join(listed)}.")
        lines += [about_clustrs(row, here[0], alone, lengths) for row in here if row["method"] == "clustrs"]
    return "\n".join(lines)


def added(row: Mapping[str, Any]) -> float:
    return row["scoring_ms"] + row["selection_ms"]


def about_clustrs(row: Row, quickest: Row, alone: Row | None, lengths: Sequence[int]) -> str:
    more = added(row) - added(quickest)
    rank = "adds least" if row is quickest else f"adds {more:.1f} ms more than {quickest['method']}"
    shares = [f"{row[f'share_of_answer_{n}']:.1%} of an answer of {n} tokens" for n in lengths]
    text = f"  ClustRS {rank}; its overhead is {' and '.join(shares)}."
    if alone is not None:
        ratios = {n: row[f"answer_{n}_ms"] / alone[f"answer_{n}_ms"] - 1 for n in lengths}
        changes = [f"{abs(r):.0%} {'less' if r < 0 else 'more'} for {n} tokens" for n, r in ratios.items()]
        text += f" Time of the answer against the unpruned model: {', '.join(changes)}."
    if row["paper_lowest_ms"] is not None:
        text += f" The paper prints an overhead of {row['paper_lowest_ms']:g} ms ({PAPER_MACHINE})."
    return text
