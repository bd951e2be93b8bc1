"""Answer a grid of methods, budgets and corruptions with smol-llava, several times faster than `clustrs eval` does.

    clustrs models get smol-llava
    python -m recipes.smol.grid out/smol            # stopped, the same command resumes
    # or on two cores two of these at once, each with --threads 1: a process takes what no other is at
    for study in geometry stability denoising overhead; do
        clustrs study $study --model smol-llava --task photos-sentences --output out/smol/$study
    done
    python -m recipes.smol.grid out/smol --store    # writes docs/results/evidence/smol-llava-*.csv

The answers so far are in results/grid.tar.xz: unpack them in out/smol to go on from there, with Pillow 13: other
releases scale photographs differently, and images that changed are refused.

The plan is ordered by importance; what is complete at any time is a table. The questions about an image read the same
system line and visual tokens: their keys and values are computed once, and finished rows leave the batch. Answers are
those of `clustrs eval` (tests/recipes/test_smol_recipe.py), in folders of ordinary runs. Methods that prune inside the
language model are answered as there.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, DynamicLayer

from clustrs import Config, expand_methods
from clustrs.evaluation.levels import curve_config, measure_curves
from clustrs.evaluation.metrics import estimates
from clustrs.evaluation.results import Method
from clustrs.evaluation.runner import Engine, Unit, Worker, run
from clustrs.evaluation.store import AnswerRecord, identity, read_answers
from clustrs.evaluation.tasks import get_task
from clustrs.models.adapters.base import get_adapter
from clustrs.models.ask import Batch, Reply
from clustrs.models.load import quiet_transformers
from clustrs.models.prompt import PrunedImage, token_ids
from clustrs.models.question import QuestionReader
from clustrs.models.select import prune_images
from clustrs.pruners import Pruner
from clustrs_models.smol import NAME
from clustrs_paper import evidence
from clustrs_paper.evidence.__main__ import chosen_levels
from clustrs_paper.evidence.place_and_weight import BOTH, PUBLISHED, SETTINGS
from clustrs_paper.evidence.results import COLUMNS, STORED, read_rows, spec, write_rows
from clustrs_paper.studies.levels import table

TASK, QUESTIONS, BATCH, GROUP = "photos-sentences", 300, 60, 20
KEEPS = (8, 16, 32, 50, 64, 144)
LADDERS = {"gaussian": (0.1, 0.25, 0.5, 1.0), "salt_pepper": (0.05, 0.15, 0.3, 0.5, 0.8)}
LOSSES = (0.1, 0.35, 0.5)
VARIANTS = ("clustrs shrink=false", "clustrs distance=euclidean shrink=false")
INSIDE = ("fastv", "pyramiddrop", "dart", "compose")
# named one by one, so that a later method does not change the configuration of stored runs
RIVALS: tuple[str, ...] = ("none", "clustrs", "clustermeans", "divprune", "fastervlm", "visionzip", "vispruner", "tome")
RIVALS += ("random", "grid")
NEWER = ("cdpruner", "downsample", "hiprune", "holov", "mmr", "prumerge-plus", "scope", "vscan")
OUTSIDE = ("none", *sorted({*RIVALS[1:], "denoise", *NEWER}), *VARIANTS)
METHODS = (*OUTSIDE, *INSIDE)
SAME_IN_BOTH = ("none", "fastv", "pyramiddrop", "dart")  # answers are the same in both settings
OTHERS = ("brightness:2", "contrast:0.5", "cutout:0.25", "motion_blur:15", "jpeg:30")
IMAGENET_C = ("imagenet_c/shot_noise:3", "imagenet_c/defocus_blur:3", "imagenet_c/fog:3")
PARAMETERS = "parameters"  # as published, with other parameters of ClustRS
NEVER = torch.finfo(torch.float32).min


class Room(DynamicLayer):  # type: ignore[misc]
    """Layer of a cache in whole keys and values [B, H, S, D] of which a part is known: a new token copies nothing."""

    def __init__(self, whole: Sequence[Tensor], known: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.grow(whole, known)

    def grow(self, whole: Sequence[Tensor], known: int) -> None:
        self.whole = whole
        self.keys, self.values = (one[:, :, :known] for one in whole)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        known, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for one, new in zip(self.whole, (key_states, value_states), strict=True):
            one[:, :, known:end] = new
        self.grow(self.whole, end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.grow([one.index_select(0, indices) for one in self.whole], self.get_seq_length())


class SharedWorker(Worker):
    """Worker that reads what the questions of an image share once."""

    @cached_property
    def eos(self) -> Tensor:
        return torch.tensor(token_ids(self.loaded[0].generation_config.eos_token_id))

    @cached_property
    def adapter(self) -> Any:
        return get_adapter(self.loaded[0])

    def _replies(self, batch: Batch, method: Pruner, count: int) -> list[Reply | str]:
        if method.where != "encoder":
            return super()._replies(batch, method, count)
        proportional, questions = self.config.attention == "proportional", None
        with torch.inference_mode():
            if "question" in method.requirements():
                given = self.adapter, batch.input_ids, batch.inputs["attention_mask"], batch.images
                questions = QuestionReader(*self.loaded, None, self.adapter.written_text).read(*given)
            kept, selections = prune_images(method, batch.images, "image", "raw", proportional, questions)
            if len({len(image.features) for image in kept}) > 1:  # a budget that the image decides
                return super()._replies(batch, method, count)
            answers = self._answers(batch, kept)
        texts = self.loaded[1].batch_decode(answers, skip_special_tokens=True)
        return [Reply(text.strip(), image) for text, image in zip(texts, selections, strict=True)]

    def _answers(self, batch: Batch, kept: Sequence[PrunedImage]) -> list[list[int]]:
        """Return the new tokens of each prompt: what comes before the images, the images, the questions, then one by
        one."""
        model = self.loaded[0]
        prompts = zip(batch.input_ids, batch.inputs["attention_mask"], strict=True)
        before, after = zip(*(split(model, *prompt) for prompt in prompts), strict=True)
        if any(not torch.equal(before[0], other) for other in before):
            raise ValueError("the prompts must begin alike")
        words = model.get_input_embeddings()
        cache: Any = DynamicCache()
        start = len(before[0])
        self._read(words(before[0][None]), torch.arange(start)[None], torch.zeros(1, start), cache)

        shown = {id(image): image for image in kept}
        rows = torch.tensor([list(shown).index(id(image)) for image in kept])
        images, compact = [*shown.values()], self.config.positions == "compact"
        total = len(images[0].features) if compact else images[0].total
        places = [torch.arange(len(image.features)) if compact else image.own for image in images]
        cache.batch_repeat_interleave(len(images))
        sizes = [torch.zeros(len(image.features)) if image.sizes is None else image.sizes.log() for image in images]
        bias = torch.cat([torch.zeros(len(images), start), torch.stack(sizes)], 1)
        self._read(torch.stack([image.features for image in images]), start + torch.stack(places), bias, cache)

        lengths = [len(row) for row in after]
        order = sorted(range(len(after)), key=lengths.__getitem__)
        width, known = max(lengths), start + len(images[0].features)
        space = [[one.new_zeros(len(order), one.shape[1], known + width + self.max_new_tokens, one.shape[3])
                  for one in (layer.keys, layer.values)] for layer in cache.layers]  # fmt: skip
        read: list[Any] = []
        for first in range(0, len(order), GROUP):  # of about equal length: little padding, which is on the left
            part = order[first : first + GROUP]
            own = lengths[part[-1]]
            layers = [Room([one[first : first + GROUP, :, width - own :] for one in both], known) for both in space]
            for layer, shared in zip(layers, cache.layers, strict=True):
                layer.keys.copy_(shared.keys.index_select(0, rows[part]))
                layer.values.copy_(shared.values.index_select(0, rows[part]))
            ids = torch.stack([pad(after[row], (own - lengths[row], 0)) for row in part])
            padding = torch.stack([torch.arange(own) < own - lengths[row] for row in part])
            part_bias = torch.cat([bias[rows[part]], torch.zeros(ids.shape).masked_fill(padding, NEVER)], 1)
            ends = start + total + torch.tensor([lengths[row] for row in part])
            places_after = (ends[:, None] - own + torch.arange(own)).clamp(min=0)
            last = self._read(words(ids), places_after, part_bias, Cache(layers))[:, -1:]
            read.append((last, pad(part_bias, (width - own, 0), value=NEVER), ends))
        hidden, bias, ends = (torch.cat(parts) for parts in zip(*read, strict=True))
        cache = Cache([Room(both, known + width) for both in space])

        answers: list[list[int]] = [[] for _ in after]
        left = torch.tensor(order)
        for _ in range(self.max_new_tokens):
            new = model.lm_head(hidden[:, -1]).argmax(-1)
            for row, token in zip(left.tolist(), new.tolist(), strict=True):
                answers[row].append(token)
            going = (~torch.isin(new, self.eos)).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(left):
                cache.batch_select_indices(going)
                left, new, bias, ends = left[going], new[going], bias[going], ends[going]
            bias = pad(bias, (0, 1))
            hidden = self._read(words(new[:, None]), ends[:, None], bias, cache)
            ends = ends + 1
        return answers

    def _read(self, embeddings: Tensor, positions: Tensor, bias: Tensor, cache: Any) -> Tensor:
        """Return the hidden states of new tokens [B, T, D]; `bias` [B, S] is added to the scores of all keys, those in
        the cache and the new ones, and later keys are not seen."""
        size, width = embeddings.shape[1], bias.shape[1]
        seen = torch.ones(size, width, dtype=torch.bool).tril(width - size)
        mask = bias[:, None, None].expand(-1, 1, size, -1).masked_fill(~seen, NEVER)
        decoder = self.loaded[0].get_decoder()
        out = decoder(inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, past_key_values=cache)
        return cast(Tensor, out.last_hidden_state)


def use_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN multiply in all linear layers, as in compiled models: on AMD's processors twice as fast as MKL."""

    def forward(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
            layer.forward = partial(forward, packed, layer.bias)  # type: ignore[method-assign]


def split(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of a prompt before and after its image."""
    real = ids[mask.bool()]
    slots = (real == model.config.image_token_id).nonzero()[:, 0]
    return real[: int(slots[0])], real[int(slots[-1]) + 1 :]


@dataclass(frozen=True)
class Stage:
    """A part of the plan: corruptions, by their levels or by the loss they cost the unpruned model."""

    corruptions: Sequence[str]
    methods: Sequence[Any]
    keeps: Sequence[int]
    questions: int
    runs: tuple[str, ...] = (PUBLISHED, BOTH)


NOISE = tuple(f"{name}@{100 * loss:g}%" for name in LADDERS for loss in LOSSES)
PAPER = ("clean", *NOISE, *OTHERS)
ALL = (*PAPER, *IMAGENET_C)
CLAIMED = ("none", "clustrs", "divprune", "fastervlm", "visionzip", *VARIANTS)
VARIED = yaml.safe_load(files(evidence).joinpath("parameters.yaml").read_text())
TAUS = tuple(method for method in VARIED["methods"] if method == "clustrs" or "tau" in method)


def claims(questions: int) -> tuple[Stage, ...]:
    """Return the stages with what the paper's claims and the headline are about."""
    return (
        Stage(PAPER, CLAIMED, (16, 50, 144), questions, (PUBLISHED,)),
        Stage(PAPER, (*CLAIMED, "clustermeans", "tome"), (16,), questions, (BOTH,)),
        Stage(VARIED["corrupt"], TAUS, VARIED["keep"], questions, (PARAMETERS,)),
    )


PLAN = (
    Stage(VARIED["corrupt"], VARIED["methods"], VARIED["keep"], 60, (PARAMETERS,)),
    Stage(ALL, OUTSIDE, (8, 16, 32, 64), 60),
    Stage(ALL, INSIDE, (16, 64), 60),
    Stage(ALL, OUTSIDE, (144,), 60),
    Stage(ALL, INSIDE, (8, 32, 144), 60),
    *(stage for questions in range(60, QUESTIONS + 1, 60) for stage in claims(questions)),
    Stage(ALL, OUTSIDE, (16,), QUESTIONS, (BOTH,)),
    Stage(ALL, ("none", *INSIDE), (16,), QUESTIONS),
)


class SharedEngine(Engine):
    """Engine that answers what a stage asks for, with one loaded model for all runs."""

    def __init__(self, loaded: tuple[Any, Any] | None = None, stage: Stage | None = None) -> None:
        self.loaded, self.stage = loaded, stage

    def run(self, config: Config, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        worker = SharedWorker(config)
        if self.loaded is not None:
            worker.__dict__["loaded"] = self.loaded
        asked = list(range(len(config.methods)))
        if self.stage is not None:
            wanted = {identity(method) for method in expand_methods(self.stage.methods, self.stage.keeps)}
            asked = [index for index, method in enumerate(config.methods) if identity(method) in wanted]
        for unit in units:
            methods = tuple(index for index in unit.methods if index in asked)
            if methods and (self.stage is None or unit.items[-1] < self.stage.questions):
                yield from worker.run(replace(unit, methods=methods))


def levels(folder: Path, engine: SharedEngine) -> dict[str, str]:
    """Return the level that costs the unpruned model each loss, from its curve, which is measured once; a loss that it
    never reaches is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "taken"):
        if not (folder / "levels.csv").exists():
            config = Config(task=TASK, model=NAME, methods=expand_methods(["none"], ()), batch_size=BATCH)
            run(curve_config(config, LADDERS, BATCH), folder, engine, progress=False)
            curves = measure_curves(config, LADDERS, folder, BATCH, progress=False)
            write_rows(folder / "levels.csv", [row for curve in curves.values() for row in table(curve, LOSSES)])
    return chosen_levels(read_rows(folder / "levels.csv"))


def folder_of(folder: Path, name: str, corruption: str) -> Path:
    setting = name if name == PARAMETERS else "-".join(SETTINGS[name])
    return folder / setting / corruption.replace("/", "-").replace(":", "-")


def answer(folder: Path, plan: Sequence[Stage]) -> None:
    """Answer the plan, stage by stage; each corruption has a run of its own in each setting, and what another process
    is at comes later."""
    loaded = SharedWorker(Config(task=TASK, model=NAME, methods=expand_methods(["none"], ()))).loaded
    use_onednn(loaded[0])
    chosen = levels(folder / "levels", SharedEngine(loaded))
    methods = {PUBLISHED: expand_methods(METHODS, KEEPS), PARAMETERS: expand_methods(VARIED["methods"], VARIED["keep"])}
    methods[BOTH] = tuple(method for method in methods[PUBLISHED] if method["name"] not in SAME_IN_BOTH)
    left = [(stage, *pair) for stage in plan for pair in product(stage.corruptions, stage.runs)]
    while left:
        busy = []
        for stage, corruption, name in left:
            level = chosen.get(corruption, corruption)
            if "@" in level:  # a loss that noise never costs
                continue
            positions, attention = SETTINGS[PUBLISHED if name == PARAMETERS else name]
            how: dict[str, Any] = {"positions": positions, "attention": attention}
            how |= {"corruptions": (level,), "limit": QUESTIONS, "batch_size": BATCH}
            config = Config(task=TASK, model=NAME, methods=methods[name], **how)
            own = folder_of(folder, name, level)
            own.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(own / "taken", timeout=0):
                    summary = run(config, own, SharedEngine(loaded, stage), progress=False)
            except Timeout:
                busy.append((stage, corruption, name))
                continue
            print(name, level, stage.keeps, stage.questions, summary, flush=True)
        if len(busy) == len(left):
            time.sleep(10)
        left = busy


def cells(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell of a run: its first questions, whole batches that have all their answers."""
    order = {item.id: i for i, item in enumerate(get_task(TASK, None, QUESTIONS).items)}
    found: dict[tuple[str, str], Any] = {}
    for record in read_answers(folder):
        if record.error is None:
            key = identity(record.method), record.corruption
            found.setdefault(key, np.full(QUESTIONS, np.nan))[order[record.item]] = record.score
    for (written, corruption), scores in found.items():
        missing = np.isnan(scores).nonzero()[0]
        right = scores[: (missing[0] if len(missing) else QUESTIONS) // BATCH * BATCH]
        if len(right):
            described = json.loads(written)
            method = {key: value["name"] if isinstance(value, dict) else value for key, value in described.items()}
            keep = method.pop("keep") if method["name"] != "none" else ""
            name, _, level = corruption.partition(":")
            estimate = estimates(100 * right[None])[0]
            numbers = [f"{value:.3f}" for value in (estimate.mean, estimate.low, estimate.high) if value is not None]
            cell = (TASK, NAME, spec(Method(method.pop("name"), "", None, method)), keep, name, level, len(right))
            bits = np.packbits(right.astype(bool)).tobytes().hex()
            yield dict(zip(COLUMNS, (*cell, *numbers, bits), strict=True))


def store(folder: Path) -> None:
    """Write what is complete: the unpruned curve, and the answers of both settings, one bit each."""
    curve = folder / "levels" / "levels.csv"
    if curve.exists():
        write_rows(STORED / f"{NAME}-levels.csv", read_rows(curve))
    unpruned: list[dict[str, Any]] = []
    for setting, name in {PUBLISHED: "grid", BOTH: "grid-both", PARAMETERS: PARAMETERS}.items():
        runs = sorted(folder_of(folder, setting, "*").parent.glob("*/answers.jsonl"))
        rows = [row for answers in runs for row in cells(answers.parent)]
        if setting == PUBLISHED:
            unpruned = [row for row in rows if row["method"] == "none"]
        if setting == BOTH:
            rows += unpruned
        if rows:
            write_rows(STORED / f"{NAME}-{name}.csv", sorted(rows, key=rank))

    study = read_rows(folder / "stability" / "stability.csv")
    if study:
        write_rows(STORED / f"{NAME}-stability.csv", [row for row in study if row["method"] != "ranking"] + ranking())
    for name in ("geometry", "denoising", "overhead"):
        if rows := read_rows(folder / name / f"{name}.csv"):
            write_rows(STORED / f"{NAME}-{name}.csv", rows)


def ranking() -> list[dict[str, Any]]:
    """Return what `recipes.smol.stability` measured on 200 photographs, as rows of the study of stability."""
    found = json.loads((Path(__file__).parent / "results" / "stability.json").read_text())
    same = {"corruption": "gaussian", "method": "ranking", "tokens": found["top"], "of": found["tokens"], "images": 200}
    rows = []
    for measure, own in {"rank_change": "rank_change", "top_overlap": "overlap"}.items():
        for level, values in found["gaussian"].items():
            low, high = values[f"{own}_95"]
            numbers = {"mean": values[own], "low": low, "high": high, "by_chance": found["chance"][own]}
            rows.append({**same, "level": f"{float(level):g}", "measure": measure, **numbers, "paper": ""})
    return rows


def rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order rows: clean first, then noise from mild to strong, then the others; then by method and budget."""
    listed = ("clean", *LADDERS)
    name = row["corruption"]
    place = listed.index(name) if name in listed else len(listed)
    return place, name, float(row["level"] or 0), row["method"], int(row["keep"] or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="write the tables of what is complete")
    given = parser.parse_args()
    if given.store:
        store(given.folder)
        return
    torch.set_num_threads(given.threads)
    quiet_transformers()
    answer(given.folder, PLAN)


if __name__ == "__main__":
    main()
