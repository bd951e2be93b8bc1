"""Run the model of a run again, for its report: times of single answers, and drawings of kept tokens.

Neither is part of a run, whose answers come in batches. Both are stored in its folder, where later reports find them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from PIL import Image

from clustrs import validation
from clustrs.evaluation.bench import describe_machine
from clustrs.evaluation.config import Config, parse_corruption
from clustrs.evaluation.metrics import CORRECT
from clustrs.evaluation.report.document import DrawnExample, Shown, data_uri
from clustrs.evaluation.report.scores import OURS, judged_on
from clustrs.evaluation.report.summary import EXAMPLES_FILE, LATENCY_FILE, PARTS, Latency, Summary
from clustrs.evaluation.results import Run, load_run
from clustrs.evaluation.runner import Worker
from clustrs.evaluation.store import identity, key_of, read_answers, read_config
from clustrs.evaluation.tasks import Item
from clustrs.models.ask import Answer, Picture, as_seen, ask, frames_of
from clustrs.models.costs import count_text, meta_model
from clustrs.models.draw import overlay_kept
from clustrs.pruners import Pruner
from clustrs.validation import write_whole

SIZE = 264  # pixels of the longer side of a drawing


def measure_latency(folder: Path, repeats: int) -> Latency:
    """Time answers of every method of a run, one at a time on clean images, and store the medians beside the run.

    Methods take turns, so that what slows the machine down hits all alike; a first round warms up and does not count.
    Beside the times are the `kv_bytes` of the visual tokens of an image, over all layers.
    """
    validation.integer("latency", repeats, 1)
    worker = Worker(Config.from_json(read_config(folder)))
    times: list[dict[str, list[float]]] = [{part: [] for part in (*PARTS, "kv_bytes")} for _ in worker.methods]
    model = worker.loaded[0]
    empty = meta_model(model.config, model.dtype)
    bytes_per_token = count_text(empty, 2)[2] - count_text(empty, 1)[2]  # without states of a fixed size
    for turn in range(repeats + 1):
        item = worker.task.items[turn % len(worker.task.items)]
        image = worker.show(item.image)
        for position in range(len(worker.methods)):
            index = (position + turn) % len(worker.methods)
            answer = _ask(worker, image, item, worker.methods[index], worker.max_new_tokens)
            spent = answer.seconds
            tokens = answer.image.average or answer.visual_tokens
            times[index]["kv_bytes"].append(bytes_per_token * tokens)
            parts = (spent.vision, spent.scoring + spent.selection, spent.prefill, spent.decode_per_token)
            for part, seconds in zip(PARTS, parts, strict=True):
                if turn and seconds is not None:
                    times[index][part].append(1e3 * seconds)
    medians = [{part: median(values) for part, values in own.items() if values} for own in times]
    described = [method.to_dict() for method in worker.methods]
    measured = Latency(describe_machine(model), repeats, tuple(zip(described, medians, strict=True)))
    write_whole(Path(folder) / LATENCY_FILE, msgspec.json.encode(measured).decode() + "\n")
    return measured


def draw_examples(folder: Path, count: int, judge: str | None = None) -> tuple[DrawnExample, ...]:
    """Draw what two methods kept on some questions where they disagree, and store that beside the run."""
    validation.integer("images", count, 1)
    run = load_run(Path(folder), judge)
    summary = Summary(run)
    worker = Worker(Config.from_json(read_config(folder)))
    items = {item.id: item for item in worker.task.items}
    chosen = find_disagreements(run, count, {name: item.image for name, item in items.items()})
    needed = {_key(run, one, method) for one in chosen for method in one.methods}
    texts = {key: record.text or "" for record in read_answers(folder) if (key := key_of(record)) in needed}
    drawn = []
    for one in chosen:
        item = items[run.items[one.item]]
        image = worker.show(item.image, _key(run, one, one.methods[0])[2], run.seeds[0])
        shown = []
        for method in one.methods:
            answer = _ask(worker, image, item, worker.methods[method], 1)
            pairs = zip(frames_of(image), answer.frames or (answer.image,), strict=True)
            seen = _in_a_row([overlay_kept(as_seen(worker.loaded[1], view), one, size=SIZE) for view, one in pairs])
            right = bool(run.scores[method, one.condition, 0, one.item] >= CORRECT)
            text = texts.get(_key(run, one, method), "")
            shown.append(Shown(summary.label(method), text, right, data_uri(seen, quality=60, method=6)))
        where = f"{run.conditions[one.condition]}, keep {run.methods[one.methods[0]].budget}, {item.image}"
        drawn.append(DrawnExample(item.question, item.answer, where, tuple(shown)))
    write_whole(Path(folder) / EXAMPLES_FILE, msgspec.json.encode(drawn).decode() + "\n")
    return tuple(drawn)


class OneSidedQuestion(NamedTuple):
    """A question (all by their indices in the run) that one of the first two methods answered well and one did not."""

    methods: tuple[int, ...]
    condition: int
    item: int


def find_disagreements(run: Run, count: int, images: Mapping[str, str]) -> list[OneSidedQuestion]:
    """Choose questions at the smallest budget: ClustRS (or else the best method) against the best other one.

    Either side is right in turn, and no image (`images` has that of each item) comes again, as long as there are such
    questions. The unpruned model comes third.
    """
    summary = Summary(run)
    orders = ([method for method, _ in summary.ranked(budget, judged_on(summary)[1])] for budget in run.budgets)
    order = next((order for order in orders if len(order) > 1), None)
    if order is None:
        return []
    first = next((method for method in order if run.methods[method].name == OURS), order[0])
    second = next(method for method in order if method != first)
    methods = (first, second) if run.unpruned is None else (first, second, run.unpruned)
    conditions, right = judged_on(summary)[1], run.scores[:, :, 0] >= CORRECT
    sides: list[list[OneSidedQuestion]] = []
    for good, bad in ((first, second), (second, first)):
        differ = (right[good] & (run.scores[bad, :, 0] < CORRECT))[conditions]  # no answer without a score does
        found = [(conditions[int(differ[:, i].argmax())], int(i)) for i in np.flatnonzero(differ.any(0))]
        sides.append([OneSidedQuestion(methods, condition, item) for condition, item in found])
    chosen: list[OneSidedQuestion] = []
    while len(chosen) < count and any(sides):
        for side in sides:
            if side and len(chosen) < count:
                shown = {images[run.items[one.item]] for one in chosen}
                fresh = (i for i, one in enumerate(side) if images[run.items[one.item]] not in shown)
                chosen.append(side.pop(next(fresh, 0)))
    return chosen


def _key(run: Run, one: OneSidedQuestion, method: int) -> tuple[str, str, str, int]:
    """Item, method, corruption and seed as records name them; a condition's level is written shorter: 2.0 as 2."""
    known = {str(parse_corruption(text) or text): text for text in run.config["corruptions"]}
    wanted = str(run.conditions[one.condition])
    corruption = known[str(parse_corruption(wanted) or wanted)]
    return run.items[one.item], identity(run.config["methods"][method]), corruption, run.seeds[0]


def _in_a_row(images: Sequence[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (sum(image.width for image in images), images[0].height))
    for number, image in enumerate(images):
        row.paste(image, (sum(one.width for one in images[:number]), 0))
    return row


def _ask(worker: Worker, image: Picture, item: Item, method: Pruner, max_new_tokens: int) -> Answer:
    names = ("scope", "crops", "positions", "attention", "prompt_template")
    options = {name: getattr(worker.config, name) for name in names}
    return ask(*worker.loaded, image, item.question, method, max_new_tokens, **options)
