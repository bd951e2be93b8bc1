"""Train mini-onevision-clips: projector and language model of mini-onevision on clips, with its vision tower as it is.

    python -m recipes.clips train        resumes from the last checkpoint
    python -m recipes.clips adopt        make the shipped weights a checkpoint, to train further without the first run's
    python -m recipes.clips export       put the result where the package ships it, weights in float16
    python -m recipes.clips measure      right answers on the test set, of gray frames, and of the most frequent answer

Settings are in `recipes/settings.toml`. No visual token is dropped, merged or moved in training.
"""

import argparse
import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from clustrs import NoPruning
from clustrs.models import ask as asking
from clustrs.models.load import load_model
from clustrs_models.clips import DIRECTIONS, KINDS, MOST, SIDE, Clip, draw, every, load, sample
from clustrs_models.drawing import PATCH, Thing
from clustrs_models.photographs import Question, generator_for
from recipes import language, models, storage, tower, train
from recipes.data import IGNORED, From, Stage, blocks, corrupted, pad, some

NAME = "mini-onevision-clips"
RESULTS = Path(__file__).with_name("results")
LOG = train.SETTINGS.parents[1] / "docs" / "training" / "clips-language.jsonl"
ORDER = ("first", "second", "third", "fourth")
WORDS = (
    *ORDER,
    "last",
    "pass",
    "passes",
    "stands",
    "direction",
    "does",
    "move",
    "up",
    "down",
    "scene",
    "changed",
    "at",
    "end",
)
"""New to the vocabulary."""
NAMES = (*KINDS, "hint")


def vocabulary() -> dict[str, int]:
    words = models.vocabulary()
    return words | {word: len(words) + i for i, word in enumerate(WORDS)}


def hints(clip: Clip) -> list[Question]:
    """Ask for each object that passes by its place in the order, and for what stands at either end of the clip."""
    there = [(f"passes {word}", one.thing) for word, one in zip(ORDER, clip.passing, strict=False)]
    there += [("passes last", clip.passing[-1].thing), ("stands first", clip.standing), ("stands last", clip.after)]
    found = []
    for words, thing in there:
        found.append(Question("hint", f"What colour {words}?", thing.color))
        found.append(Question("hint", f"What shape {words}?", thing.shape))
    for word, one in zip(ORDER, clip.passing, strict=False):
        found.append(Question("hint", f"Which direction does the {word} object move?", one.direction))
    return found


TRACES = {"order": (MOST, 4), "way": (len(DIRECTIONS), 3), "swap": (2, 4), "begins": (2, 3), "number": (MOST + 1, 4)}
"""Classes of a visual token, and after how many layers of the language model its state is classified: its object's
place in the order, its direction, and whether what stands was exchanged. Of the newline after a frame: whether an
object comes with it, and how many have come until then."""


POINTING, HEADS = {"named": 3, "about": 4}, 2
"""Layers, by their index, in which the first heads must attend to the object that a question is about: from the end of
its name, and from where the answer is predicted."""


def subject(clip: Clip, question: str) -> int:
    """The object that a question is about: its number in the order, MOST: what stands at first, MOST + 1: at last."""
    if "stands" in question or "changed" in question:
        return MOST if "stands first" in question else MOST + 1
    named = [number for number, one in enumerate(clip.passing) if one.thing.name in question]
    ordered = [number for number, word in enumerate(ORDER) if f" {word}" in question]
    last = [len(clip.passing) - 1] if "passes last" in question else []
    return next(iter((*named, *ordered, *last)), IGNORED)


def traces(clip: Clip) -> dict[str, NDArray[np.int64]]:
    """Labels (frames, tokens and newline) of the tokens on objects, as far as the frames until then can tell."""
    side = SIDE // PATCH
    y, x = (PATCH * axis.reshape(-1) + PATCH / 2 for axis in np.mgrid[:side, :side])
    labels = {name: np.full((clip.length, side * side + 1), IGNORED) for name in (*TRACES, "subject")}

    def on(thing: Thing) -> NDArray[np.bool_]:
        return np.append(np.hypot(x - thing.x, y - thing.y) < 9, False)

    for frame in range(clip.length):
        labels["begins"][frame, -1] = any(frame == one.frames.start for one in clip.passing)
        labels["number"][frame, -1] = sum(frame >= one.frames.start for one in clip.passing)
        for number, one in enumerate(clip.passing):
            if frame in one.frames:
                there = on(one.at(frame)) & ~on(clip.standing)
                labels["order"][frame, there] = labels["subject"][frame, there] = number
                if frame > one.frames.start:
                    labels["way"][frame, there] = list(DIRECTIONS).index(one.direction)
        late = frame >= clip.until
        labels["subject"][frame, on(clip.after if late else clip.standing)] = MOST + late
        if late:
            labels["swap"][frame, on(clip.after)] = int(clip.changed)
    return labels


class Clips(Dataset[dict[str, Tensor]]):
    """Item n is the whole batch of step n."""

    def __init__(self, settings: dict[str, Any], stage: int, plan: Stage, words: dict[str, int]) -> None:
        self.settings, self.stage, self.plan, self.words = settings, stage, plan, words

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        turn = step % len(self.plan.sides)
        rows: list[dict[str, Any]] = []
        for number in range(self.plan.images[turn]):
            generator = generator_for(self.settings["seed"], 3, self.stage, step, number)
            clip = sample(generator, self.plan.sides[turn])
            frames = [corrupted(frame, self.settings["photometry"], generator) for frame in draw(clip, generator)]
            asked = every(clip) + some(hints(clip), self.settings["clips"]["hints"], generator)
            row: dict[str, Any] = {"pixels": np.stack(frames), **traces(clip)} | blocks(asked, self.words, NAMES)
            about = np.array([subject(clip, question.text) for question in asked])
            about, ends = about[row["segments"]], np.append(row["ids"][1:] == self.words["move"], False)
            row["named"] = np.where(ends & (row["ids"] != self.words["object"]), about, IGNORED)
            row["about"] = np.where(row["kinds"] >= 0, about, IGNORED)
            rows.append(row)
        padding = {"ids": 0, "segments": -1, "positions": 0, "targets": IGNORED, "kinds": -1}
        for key, value in (padding | dict.fromkeys(POINTING, IGNORED)).items():
            pad(rows, key, value)
        return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


class Asking(language.Asking):
    """All questions about a clip in one pass; the frames are images of one prompt, each with its number before it and
    its newline after it."""

    def __init__(self, model: Any, encoder: Any, words: dict[str, int]) -> None:
        super().__init__(model, encoder, words)
        self.words = words
        self.heads = nn.ModuleDict({name: nn.Linear(model.lm_head.in_features, n) for name, (n, _) in TRACES.items()})
        self.states: dict[int, list[Tensor]] = {depth: [] for depth in POINTING.values()}
        for depth, states in self.states.items():
            norm = self.language.layers[depth].input_layernorm
            norm.register_forward_hook(lambda *given, states=states: states.append(given[2]))

    def columns(self, batch: dict[str, Tensor]) -> list[int]:
        """Where the visual tokens of all frames, and the newline after each, stand in the prompt."""
        found: list[int] = []
        start = len(self.prefix)
        for number in range(batch["pixels"].shape[1]):
            start += len(str(number + 1))
            found += range(start, start + batch["order"].shape[2])
            start += batch["order"].shape[2]
        return found

    def pointed(self, batch: dict[str, Tensor], name: str) -> tuple[Tensor, dict[str, float]]:
        """Loss of the attention with which the first heads of a layer meet what a question is about, and its share."""
        attention = self.language.layers[POINTING[name]].self_attn
        ahead, text = self.states[POINTING[name]][-2:]
        length, there = ahead.shape[1], torch.arange(ahead.shape[1])[None]
        keys = language.rotated(attention.k_proj(ahead), attention, self.language.rotary_emb(ahead, there))
        turns = self.language.rotary_emb(text, length + batch["positions"])
        queries = language.rotated(attention.q_proj(text), attention, turns)
        logits = (queries[:, :HEADS] @ keys[:, :HEADS].transpose(2, 3)).float() * attention.head_dim**-0.5
        shares = logits.softmax(-1)[..., self.columns(batch)]
        own = batch[name][:, :, None] == batch["subject"].flatten(1)[:, None]
        own = own & (batch[name][:, :, None] != IGNORED)
        share = (shares * own[:, None]).sum(-1).transpose(1, 2)[own.any(-1)]
        return -share.clamp(min=1e-6).log().mean(), {name: share.mean().item()}

    def traced(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Loss of classifiers of the visual tokens, which are thrown away later, and how much they have right."""
        columns, total, report = self.columns(batch), torch.zeros(()), {}
        for name, head in self.heads.items():
            labels = batch[name].flatten()
            if (labels != IGNORED).any():
                ahead = self.states[TRACES[name][1]][-2]
                logits = head(ahead[:, columns]).flatten(0, 1).float()
                total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED)
                there = labels != IGNORED
                report[name] = (logits.argmax(-1)[there] == labels[there]).float().mean().item()
        return total, report

    def image(self, batch: dict[str, Tensor]) -> Tensor:
        clips, length = batch["pixels"].shape[:2]
        pixels = batch["pixels"].flatten(0, 1)
        with torch.no_grad():
            features = self.encoder[0].features(pixels, torch.zeros(len(pixels), 2, dtype=torch.long))
        visual = self.projector(features).unflatten(0, (clips, length))
        assert self.newline is not None
        newline, parts = self.newline.expand(clips, 1, -1), []
        for number in range(length):
            digits = torch.tensor([self.words[digit] for digit in str(number + 1)])
            parts += [self.language.embed_tokens(digits).expand(clips, -1, -1), visual[:, number], newline]
        return torch.cat(parts, 1)


def build(settings: dict[str, Any]) -> Any:
    """Return mini-onevision for the frames of clips, with the new words."""
    own = settings["clips"]
    torch.manual_seed(settings["seed"])
    model, old = models.onevision(own), load_model("mini-onevision")[0]
    weights = old.state_dict()
    name = next(name for name in weights if name.endswith("position_embedding.weight"))
    whole = int(len(weights[name]) ** 0.5)
    rows = own["window"] + torch.arange(own["encoder"]["grid"])
    weights[name] = weights[name].unflatten(0, (whole, whole))[rows][:, rows].flatten(0, 1)
    model.load_state_dict(weights)
    words, known = vocabulary(), len(models.vocabulary())
    model.resize_token_embeddings(len(words), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[known:].normal_()
        model.lm_head.weight[known:].normal_(0, own["language"]["width"] ** -0.5)
    model.model.vision_tower.requires_grad_(False)
    return model


def make_processor(settings: dict[str, Any]) -> Any:
    processor = models.onevision_processor(settings["clips"])
    processor.tokenizer = models.tokenizer(vocabulary())
    processor.chat_template = models.TEMPLATE.replace("<image>", "{{ loop.index }} <image>")
    return processor


def loss(asker: Asking, batch: dict[str, Tensor], traced: bool = False) -> tuple[Tensor, dict[str, float]]:
    for states in asker.states.values():
        states.clear()
    logits, there = asker(batch).float(), batch["targets"] != IGNORED
    targets, kinds = batch["targets"][there], batch["kinds"][there]
    right = (logits.argmax(-1) == targets).float()
    report = {name: right[kinds == i].mean().item() for i, name in enumerate(NAMES)}
    total = F.cross_entropy(logits, targets)
    if traced:
        for further, shares in (asker.traced(batch), *(asker.pointed(batch, name) for name in POINTING)):
            total, report = total + 0.3 * further, report | shares
    return total, report


def learn(settings: dict[str, Any], folder: Path) -> None:
    own, words, model = settings["clips"]["language"], vocabulary(), build(settings)
    asker = Asking(model, tower.Siglip(model.model.vision_tower), words)

    def batches(number: int, stage: Stage, first: int) -> DataLoader[dict[str, Tensor]]:
        steps = From(first, stage.steps)
        clips = Clips(settings, number, stage, words)
        return DataLoader(clips, batch_size=None, sampler=steps, num_workers=1, prefetch_factor=4)

    def step(stage: Stage, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(asker, batch, stage.traces)

    run = train.start(folder, train.parts(model) | {"heads": asker.heads}, own)
    run.stages(train.stages(own), batches, step)


def adopt(settings: dict[str, Any], folder: Path) -> None:
    """Put the shipped weights and their log where `learn` goes on from; classifiers and AdamW's means begin anew."""
    run = train.start(folder, train.parts(load_model(NAME)[0]), settings["clips"]["language"])
    last = json.loads(LOG.read_text().splitlines()[-1])
    run.step, run.seconds = last["step"], float(last["seconds"])
    run.save()
    (folder / "log.jsonl").write_text(LOG.read_text())


def export(settings: dict[str, Any], folder: Path) -> None:
    model = build(settings)
    for name, part in train.parts(model).items():
        train.trained(part, folder / "checkpoint.safetensors", name)
    models.save(model, make_processor(settings), folder / NAME)
    storage.store(folder / NAME, train.SHIPPED / NAME)
    LOG.write_text((folder / "log.jsonl").read_text())


def measure() -> dict[str, Any]:
    """Right answers in per cent, over all and by kind: of the model, of it without sight, and of a constant answer."""
    task, (model, processor) = load(), load_model(NAME)
    answers: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    right: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("clean", "gray frames")}
    for image, group in groupby(tqdm(task.items), key=lambda item: item.image):
        items, frames = list(group), task.frames(image)
        gray = [Image.new("RGB", frame.size, (128, 128, 128)) for frame in frames]
        prompts = [(0, asking.chat_prompt(processor, item.question, images=len(frames))) for item in items]
        for name, shown in (("clean", frames), ("gray frames", gray)):
            batch = asking.encode(model, processor, [shown], prompts, records=())
            for item, reply in zip(items, asking.reply(model, processor, batch, NoPruning(), 4), strict=True):
                right[name][item.kinds[0]].append(task.score(item, reply.text) or 0.0)
        for item in items:
            answers[item.kinds[0]][item.question if item.kinds[0] == "second" else "", item.answer] += 1
    found: dict[str, Any] = {"model": NAME, "questions": len(task.items)}
    for name, kinds in right.items():
        every_score = [score for scores in kinds.values() for score in scores]
        by_kind = {kind: 100 * sum(scores) / len(scores) for kind, scores in sorted(kinds.items())}
        found[name] = {"right": 100 * sum(every_score) / len(every_score), "by kind": by_kind}
    most = {kind: sum(best(counts).values()) for kind, counts in sorted(answers.items())}
    constant = {kind: 100 * count / answers[kind].total() for kind, count in most.items()}
    return {**found, "most frequent answer": {"right": 100 * sum(most.values()) / len(task.items), "by kind": constant}}


def best(counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """How often the most frequent answer of each form of a question is right."""
    found: dict[str, int] = {}
    for (form, _), count in counts.items():
        found[form] = max(count, found.get(form, 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "adopt", "export", "measure"))
    parser.add_argument(
        "--folder", type=Path, default=Path("build/train/clips-language"), help="for checkpoint and log"
    )
    options = parser.parse_args()
    settings = tomllib.loads(train.SETTINGS.read_text())
    if options.step == "measure":
        text = json.dumps(measure(), indent=2) + "\n"
        (RESULTS / f"{NAME}.json").write_text(text)
        print(text)
    else:
        {"train": learn, "adopt": adopt, "export": export}[options.step](settings, options.folder)


if __name__ == "__main__":
    main()
