"""Run the model of a run again, for its report: times of single answers, and drawings of kept tokens.

Neither is part of a run, whose answers come in batches and share the vision encoder's work. Both are stored in the
run's folder, from where every later report takes them.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from clustrs import validation
from clustrs.evaluation.config import Config, parse_corruption
from clustrs.evaluation.report.comparisons import OURS, judged_on, ranked
from clustrs.evaluation.report.document import DrawnExample, Shown
from clustrs.evaluation.report.overview import EXAMPLES_FILE, LATENCY_FILE, PARTS, Latency, encode_examples
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import SCORED, Run, load_run
from clustrs.evaluation.runner import Worker
from clustrs.evaluation.store import identity, read_answers, read_config, write_whole
from clustrs.evaluation.tasks import Item
from clustrs.models.ask import Answer, as_seen, ask
from clustrs.models.draw import overlay_kept
from clustrs.pruners import Pruner

SIZE = 264
"""Pixels of the longer side of a drawing."""


def measure_latency(folder: Path, repeats: int) -> Latency:
    """Time answers of every method of a run, one at a time on clean images, and store the medians beside the run.

    Methods take turns, so that what slows the machine down hits all alike; a first round warms up and does not count.
    """
    validation.integer("latency", repeats, 1)
    worker = _worker(folder)
    times: list[list[dict[str, float]]] = [[] for _ in worker.methods]
    for turn in range(repeats + 1):
        item = worker.task.items[turn % len(worker.task.items)]
        image = worker.task.open(item.image)
        for position in range(len(worker.methods)):
            index = (position + turn) % len(worker.methods)
            seconds = _ask(worker, image, item, worker.methods[index], worker.max_new_tokens).seconds
            parts = {"vision": seconds.vision, "selection": seconds.scoring + seconds.selection}
            parts |= {"prefill": seconds.prefill}
            parts |= {} if seconds.decode_per_token is None else {"decode": seconds.decode_per_token}
            if turn:
                times[index].append(parts)
    medians = [_medians(runs) for runs in times]
    described = [method.to_dict() for method in worker.methods]
    measured = Latency(_machine(worker.loaded[0]), repeats, tuple(zip(described, medians, strict=True)))
    write_whole(Path(folder) / LATENCY_FILE, measured.to_json())
    return measured


def draw_examples(folder: Path, count: int, judge: str | None = None) -> tuple[DrawnExample, ...]:
    """Draw what two methods kept on some questions where they disagree, and store that beside the run."""
    validation.integer("images", count, 1)
    run = load_run(Path(folder), judge)
    worker = _worker(folder)
    items = {item.id: item for item in worker.task.items}
    chosen = find_disagreements(run, count, {name: item.image for name, item in items.items()})
    texts = _texts(Path(folder), run, chosen)
    drawn = tuple(_example(worker, run, one, items[run.items[one.item]], texts) for one in chosen)
    write_whole(Path(folder) / EXAMPLES_FILE, encode_examples(drawn))
    return drawn


@dataclass(frozen=True)
class OneSidedQuestion:
    """A question (all by their indices in the run) that one of the first two methods answered well and one did not."""

    methods: tuple[int, ...]
    condition: int
    seed: int
    item: int


def find_disagreements(run: Run, count: int, images: Mapping[str, str]) -> list[OneSidedQuestion]:
    """Choose questions at the smallest budget: ClustRS (or else the best method) against the best other one.

    Either side is right in turn, and no image (`images` has that of each item) comes again, as long as there are such
    questions. The unpruned model comes third.
    """
    summary = Summary(run)
    for budget in run.budgets:
        order = [method for method, _ in ranked(summary, budget)]
        first = next((method for method in order if run.methods[method].name == OURS), order[0] if order else None)
        others = [method for method in order if method != first]
        if first is not None and others:
            sides = [list(_one_sided(summary, a, b)) for a, b in ((first, others[0]), (others[0], first))]
            third = () if run.unpruned is None else (run.unpruned,)
            cells = _alternate(sides, count, [images[item] for item in run.items])
            return [OneSidedQuestion((first, others[0], *third), *cell) for cell in cells]
    return []


def _one_sided(summary: Summary, right: int, wrong: int) -> Iterator[tuple[int, int, int]]:
    """Condition, seed and item of what one method answered well and another did not, an item once."""
    run, (_, conditions) = summary.run, judged_on(summary)
    for item in range(len(run.items)):
        for condition in conditions:
            cells = [(method, condition, 0, item) for method in (right, wrong)]
            if all(run.states[cell] == SCORED for cell in cells) and (
                run.scores[cells[0]] >= 0.5 > run.scores[cells[1]]
            ):
                yield condition, 0, item
                break


def _alternate(
    sides: Sequence[list[tuple[int, int, int]]], count: int, images: Sequence[str]
) -> list[tuple[int, int, int]]:
    """Take from one side, then from the other, what is about a new image, or else what comes first."""
    chosen: list[tuple[int, int, int]] = []
    queues = [list(side) for side in sides]
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                shown = {images[item] for *_, item in chosen}
                fresh = next((cell for cell in queue if images[cell[2]] not in shown), queue[0])
                queue.remove(fresh)
                chosen.append(fresh)
    return chosen


def _texts(folder: Path, run: Run, chosen: Sequence[OneSidedQuestion]) -> dict[tuple[str, str, str, int], str]:
    """The recorded answers to the chosen questions, by item, method, corruption and seed."""
    needed = {_key(run, one, method) for one in chosen for method in one.methods}
    texts = {}
    for record in read_answers(folder):
        key = (record.item, identity(record.method), record.corruption, record.seed)
        if key in needed and record.text is not None:
            texts[key] = record.text
    return texts


def _key(run: Run, one: OneSidedQuestion, method: int) -> tuple[str, str, str, int]:
    corruption = next(text for text in run.config["corruptions"] if _same(text, str(run.conditions[one.condition])))
    return run.items[one.item], identity(run.config["methods"][method]), corruption, run.seeds[one.seed]


def _same(text: str, condition: str) -> bool:
    """Return whether a corruption of the configuration is a condition, whose level is written shorter: 2.0 as 2."""
    return str(parse_corruption(text) or text) == str(parse_corruption(condition) or condition)


def _example(
    worker: Worker, run: Run, one: OneSidedQuestion, item: Item, texts: dict[tuple[str, str, str, int], str]
) -> DrawnExample:
    corruption = parse_corruption(_key(run, one, one.methods[0])[2])
    image = worker.task.open(item.image)
    image = corruption.apply(image, item.image, run.seeds[one.seed]) if corruption else image
    shown = []
    for method in one.methods:
        answer = _ask(worker, image, item, worker.methods[method], 1)
        seen = overlay_kept(as_seen(worker.loaded[1], image), answer.image, size=SIZE)
        label = "unpruned" if run.methods[method].keep is None else run.methods[method].label
        right = bool(run.scores[method, one.condition, one.seed, one.item] >= 0.5)
        shown.append(Shown(label, texts.get(_key(run, one, method), ""), right, _data_uri(seen)))
    where = f"{run.conditions[one.condition]}, keep {run.methods[one.methods[0]].budget}, {item.image}"
    return DrawnExample(item.question, item.answer, where, tuple(shown))


def _data_uri(image: Image.Image) -> str:
    content = BytesIO()
    image.save(content, "webp", quality=60, method=6)
    return f"data:image/webp;base64,{b64encode(content.getvalue()).decode()}"


def _worker(folder: Path) -> Worker:
    """The model and the task of a run."""
    return Worker(Config.from_json(read_config(folder)))


def _ask(worker: Worker, image: Image.Image, item: Item, method: Pruner, max_new_tokens: int) -> Answer:
    config = worker.config
    return ask(
        *worker.loaded,
        image,
        item.question,
        method,
        max_new_tokens,
        scope=config.scope,
        crops=config.crops,
        positions=config.positions,
        attention=config.attention,
        prompt_template=config.prompt_template,
    )


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """In milliseconds; a part that no answer had is left out."""
    parts = {part: [1e3 * run[part] for run in runs if part in run] for part in PARTS}
    return {part: median(values) for part, values in parts.items() if values}


def _machine(model: Any) -> str:
    """Describe where the model runs."""
    kind, threads = model.device.type, torch.get_num_threads()
    name = torch.cuda.get_device_name(model.device) if kind == "cuda" else kind.upper()
    where = f"{name}, {threads} thread{'s' * (threads > 1)}" if kind == "cpu" else name
    return f"{where}, {str(model.dtype).removeprefix('torch.')}"
