"""Choose a method and a budget on a user's images, without labels: the unpruned model's answers are the reference.

Successive halving: all candidates see the first images, and of each budget the better half goes on to twice as many.
Every image passes the vision tower once. Each measurement is a JSON line, written at once, which a later call reuses.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor

import clustrs
from clustrs import validation
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import FORMATS, open_image
from clustrs.evaluation.config import expand_methods
from clustrs.evaluation.metrics import Estimate, estimates
from clustrs.evaluation.report.tuning import Measure, TunedCandidate, TuningResult, order
from clustrs.evaluation.runner import one_line, printable
from clustrs.evaluation.store import append_records, drop_torn_line, locked, read_records
from clustrs.evaluation.tasks import has_surrogates, normalize_answer
from clustrs.models import ask as asking
from clustrs.models.attach import Handle
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import cache_bytes
from clustrs.models.scoring import now
from clustrs.pruners import NoPruning, list_methods, variant_labels
from clustrs.validation import Attention, Positions, PromptTemplate

QUESTIONS = ("Describe the image.", "What is in the image?", "What text is in the image?")
KEEPS = (0.5, 0.25, 0.125, 0.0625, 0.03125)
LEFT_OUT = ("none", "random", "grid", "denoise")  # unless they are asked for
BLANK = 3  # images without any answer after which a run stops
UNPRUNED = PruningConfig(method=NoPruning())
ImageSource = str | os.PathLike[str] | Image.Image


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one candidate on one question: `values` by name, none of a candidate with an `error`.

    "tokens" is the share of the reference's tokens that come first under the pruned model, "logprob" their mean
    log-probability, "kl" the divergence of the first token's distribution from the unpruned model's. "encode" is the
    time of the tower, "seconds" that of selection and prefill.
    """

    setting: str
    candidate: str
    image: str
    question: str
    reference: str
    answer: str = ""
    values: dict[str, float] = {}
    error: str | None = None


def tune(
    model: Any,
    processor: Any,
    images: str | os.PathLike[str] | Sequence[ImageSource],
    questions: Sequence[str] | Sequence[Sequence[str]] | None = None,
    *,
    target: float = 0.97,
    measure: Measure = "agreement",
    methods: Sequence[str | Mapping[str, Any]] | None = None,
    keep: Sequence[int | float] = KEEPS,
    positions: Sequence[Positions] = ("auto",),
    attention: Sequence[Attention] = ("auto",),
    corrupt: str | None = None,
    seed: int = 0,
    max_new_tokens: int = 32,
    prompt_template: PromptTemplate = "checkpoint",
    minutes: float | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> TuningResult:
    """Find the method and the smallest budget with which a model still answers as it does unpruned.

    Args:
        model: A transformers model.
        processor: Its processor.
        images: A folder, or paths and images. Those that cannot be read are left out and counted.
        questions: Texts that are asked about every image, or a list of texts for each; by default three general ones.
        target: Share of the measure that must be reached, above 0 and at most 1.
        measure: "agreement" of answers without case and full stop, "exact" agreement, or that of single "tokens".
        methods: Methods as `expand_methods` takes them; by default all that prune at the encoder's output.
        keep: Budgets.
        positions: Positions to try.
        attention: Attention to try.
        corrupt: Corruption of the images, NAME:LEVEL; answers are then also compared with those on clean images.
        seed: Seed of the corruption.
        max_new_tokens: Length of the longest answer.
        prompt_template: Template of the prompt.
        minutes: Time after which the search stops with what it has.
        output: Folder for the measurements, which a later call with the same arguments resumes, and for the results.
        progress: Show a progress bar.

    Returns:
        Measurements of all candidates, and a recommendation.

    Raises:
        ValueError: A bad argument, no image that can be read, or a model that answers nothing.

    Examples:
        >>> model, processor = load_model("mini-llava")
        >>> paths, asked = [image_path("sample:scene-1")], ["How many objects are there?"]
        >>> result = tune(model, processor, paths, asked, methods=["clustermeans"], keep=[64, 16])
        >>> [candidate.name for candidate in result.candidates]
        ['keep 64 with clustermeans', 'keep 16 with clustermeans']
    """
    check_limits(target, minutes)
    validation.choice("measure", measure, get_args(Measure))
    validation.integer("max_new_tokens", max_new_tokens, 1)
    methods = methods or [name for name in list_methods("encoder") if name not in LEFT_OUT]
    places: list[Any] = [{"positions": where, "attention": how} for where in positions for how in attention]
    pruners = [clustrs.from_dict(one) for one in expand_methods(methods, keep) if one["name"] != "none"]
    configs = [PruningConfig(method=pruner, **place) for pruner in pruners for place in places]
    validation.check(bool(configs), "methods", "at least one method that prunes", methods)
    items = pair(images, QUESTIONS if questions is None else questions)
    asked = dict.fromkeys(text for _, own in items for text in own)
    for text in asked:
        asking.chat_prompt(processor, text, prompt_template)
    random.Random(0).shuffle(items)
    tuner = Tuner(model, processor, max_new_tokens, prompt_template, corrupt, seed)
    tuner.deadline = math.inf if minutes is None else monotonic() + 60 * minutes
    with ExitStack() as stack:
        if output is not None:
            Path(output).mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(Path(output) / "lock", f"folder {str(output)!r}"))
            tuner.open(Path(output) / "tune.jsonl")
        finalists, complete = tuner.search(configs, items, measure, progress)
    unpruned = tuner.summary(UNPRUNED, measure)
    facts: dict[str, Any] = {"model": str(getattr(model.config, "_name_or_path", "")), "questions": len(asked)}
    facts |= {"corrupt": corrupt, "target": target, "measure": measure}
    results = []
    for config, label in zip(configs, variant_labels([config.method for config in configs]), strict=True):
        one = tuner.summary(config, measure, config in finalists)
        label += f" {config.positions} {config.attention}" if len(places) > 1 else ""
        noted = {**facts, "images": one.images, "interval": [one.quality.low, one.quality.high], **one.means}
        results.append(replace(one, label=label, config=replace(config, tuned_on=noted if one.images else {})))
    total = unpruned.means["unpruned_tokens"]
    results.sort(key=lambda one: -one.keep * (total if isinstance(one.keep, float) else 1))
    reached = [one for one in results if one.finalist and (one.quality.mean or 0) >= target]
    reached.sort(key=lambda one: (-one.means["visual_tokens"], order(one)))
    chosen = reached[-1] if reached else None
    result = TuningResult(tuple(results), unpruned, chosen, target, measure, complete, tuner.unreadable)
    if output is not None:
        result.save(output)
    return result


def check_limits(target: float, minutes: float | None) -> None:
    validation.check(validation.is_number(target) and 0 < target <= 1, "target", "a number above 0, at most 1", target)
    if minutes is not None:
        validation.above("minutes", minutes, 0)


def pair(images: Any, questions: Sequence[Any]) -> list[tuple[ImageSource, list[str]]]:
    """Return each image with its questions; those of a folder by name."""
    if isinstance(images, str | os.PathLike):
        folder, suffixes = Path(images), {end for end, kind in Image.registered_extensions().items() if kind in FORMATS}
        if not os.path.isdir(folder):
            raise ValueError(f"images must be a folder, got {str(images)!r}")
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())
        if not images:
            raise ValueError(f"images must be a folder with images, got {str(folder)!r}, which has none")
    validation.check(bool(images), "images", "at least one image", images)
    own = [[*one] for one in questions if not isinstance(one, str)] or [[*questions]] * len(images)
    if len(own) != len(images) or not all(own):
        raise ValueError("questions must be texts, or a list of at least one text for each image")
    for text in (text for texts in own for text in texts):
        if not isinstance(text, str) or has_surrogates(text):
            raise ValueError(f"questions must be texts, got {validation.excerpt(text)}")
    return list(zip(images, own, strict=True))


def fingerprint(model: Any) -> str:
    """Return a checksum of a model's configuration and of a few numbers of every weight."""
    checksum = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        checksum.update(f"{name}{weight.flatten()[:4].float().tolist()}".encode())
    return checksum.hexdigest()


def key(config: PruningConfig) -> str:
    """Return the text by which a candidate's measurements are found."""
    return json.dumps({"method": config.method.to_dict(), **config.options()}, sort_keys=True)


class Reference(NamedTuple):
    """Answer of the unpruned model. `plain` says that generation chose the likeliest tokens, unchanged by penalties."""

    ids: Tensor
    text: str
    first: Tensor
    plain: bool
    clean: str | None = None  # the answer on the image before it was corrupted


@dataclass
class Tuner:
    """Measures candidates against the unpruned model, image by image. What it measured is in `known`."""

    model: Any
    processor: Any
    max_new_tokens: int
    template: PromptTemplate = "checkpoint"
    corrupt: str | None = None
    seed: int = 0
    deadline: float = math.inf  # at the end of the first image or later
    known: dict[tuple[str, str, str], Measured] = field(default_factory=dict)  # by candidate, image and question
    seen: list[tuple[str, list[str]]] = field(default_factory=list)  # checksums of images, and their questions
    unreadable: dict[str, str] = field(default_factory=dict)
    file: Path | None = None

    def __post_init__(self) -> None:
        decisive = (clustrs.__version__, torch.__version__, fingerprint(self.model), self.max_new_tokens, self.template)
        text = json.dumps([*decisive, self.corrupt, self.seed])
        self.setting = hashlib.sha256(text.encode()).hexdigest()[:16]  # only measurements of the same are reused
        self.corruption = Corruption.parse(self.corrupt) if self.corrupt else None

    def open(self, file: Path) -> None:
        """Read the measurements of earlier calls, and write further ones there."""
        self.file = file
        if file.exists():
            drop_torn_line(file)
            records = (record for _, record in read_records(file, Measured) if record.setting == self.setting)
            self.known = {(one.candidate, one.image, one.question): one for one in records}

    def search(
        self, configs: Sequence[PruningConfig], items: Sequence[Any], measure: Measure, bar: bool
    ) -> tuple[list[PruningConfig], bool]:
        """Measure by successive halving; return the candidates that were left, and whether they saw all images."""
        from tqdm import tqdm

        groups: dict[str, list[PruningConfig]] = {}  # by budget; as text, since 1 is one token and 1.0 all of them
        for config in configs:
            groups.setdefault(str(config.method.keep), []).append(config)
        halvings = min(math.ceil(math.log2(max(map(len, groups.values())))), int(math.log2(len(items))))
        ends = [math.ceil(len(items) / 2 ** (i + 1)) for i in range(halvings)]
        sizes = [2 ** sum(end <= number for end in ends) for number in range(len(items))]
        total = sum(math.ceil(len(group) / size) for size in sizes for group in groups.values())
        with tqdm(total=total, desc="tuning", unit="measurement", disable=not bar, dynamic_ncols=True) as shown:
            for number, (source, questions) in enumerate(items):
                if number in ends:
                    for budget, group in groups.items():
                        found = sorted((self.summary(one, measure) for one in group), key=order, reverse=True)
                        groups[budget] = [one.config for one in found[: math.ceil(len(group) / 2)]]
                alive = [config for group in groups.values() for config in group]
                if not self.see(source, questions, alive, shown.update):
                    return alive, False
                if len(self.seen) == BLANK or number + 1 == len(items):
                    self.check_answers()
        return alive, True

    def check_answers(self) -> None:
        if not self.seen:
            name, error = next(iter(self.unreadable.items()))
            raise ValueError(f"images: none of {len(self.unreadable)} could be read; {name}: {error}")
        if not any(one.reference for one in self.known.values()):
            raise ValueError("the unpruned model answers nothing: ask other questions, or check prompt_template")

    def see(self, source: ImageSource, questions: list[str], configs: Sequence[PruningConfig], done: Any = id) -> bool:
        """Measure candidates on an image; False if the time was over before."""
        name = f"image {len(self.seen) + 1}" if isinstance(source, Image.Image) else Path(source).name
        try:
            image = source.convert("RGB") if isinstance(source, Image.Image) else open_image(source)
        except ValueError as error:
            self.unreadable[printable(name)] = str(error)
            done(len(configs))
            return True
        shown = self.corruption.apply(image, name, self.seed) if self.corruption else image
        digest = hashlib.sha256(f"{shown.size}".encode() + shown.tobytes()).hexdigest()[:16]
        missing = [one for one in configs if any((key(one), digest, text) not in self.known for text in questions)]
        done(len(configs) - len(missing))
        deadline = self.deadline if self.seen else math.inf
        if missing and monotonic() > deadline:
            return False
        self.seen.append((digest, questions))
        if not missing:
            return True
        prompts = [(0, asking.chat_prompt(self.processor, text, self.template)) for text in questions]
        needed, start = {need for one in missing for need in one.method.requirements()}, now(self.model.device)
        batch = asking.encode(self.model, self.processor, [shown], prompts, records=needed)
        seconds = now(self.model.device) - start
        original = asking.encode(self.model, self.processor, [image], prompts) if self.corruption else None
        with UNPRUNED(self.model) as handle, torch.inference_mode():
            references = [self.answer(handle, batch, row) for row in range(len(questions))]
            if original:
                cleans = [self.answer(handle, original, row).text for row in range(len(questions))]
                references = [one._replace(clean=text) for one, text in zip(references, cleans, strict=True)]
        if len(self.seen) == 1:  # the first call pays for what is set up once
            self.measured(UNPRUNED, batch, references[:1], seconds)
        for config in (UNPRUNED, *missing):
            if monotonic() > deadline:
                return False
            found: list[dict[str, Any]]
            try:
                found = self.measured(config, batch, references, seconds)
            except Exception as error:  # methods and models raise many kinds
                if config is UNPRUNED:
                    raise
                found = [{"error": printable(one_line(error))}] * len(questions)
            facts: dict[str, Any] = {"setting": self.setting, "candidate": key(config), "image": digest}
            records = [
                Measured(question=text, reference=reference.text, **facts, **own)
                for text, reference, own in zip(questions, references, found, strict=True)
            ]
            self.known |= {(one.candidate, one.image, one.question): one for one in records}
            if self.file is not None:
                append_records(self.file, records)
            done(config is not UNPRUNED)
        return True

    def answer(self, handle: Handle, prompts: asking.Batch, row: int) -> Reference:
        batch = asking.part(prompts, row)
        greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": self.max_new_tokens}
        kept = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        out = handle.generate(batch.images, **batch.inputs, **greedy, **kept)
        ids = out.sequences[0, batch.input_ids.shape[1] :]
        plain = all(torch.equal(score, logits) for score, logits in zip(out.scores, out.logits, strict=True))
        text = printable(self.processor.decode(ids, skip_special_tokens=True).strip())
        return Reference(ids, text, out.logits[0][0].float().log_softmax(-1), plain)

    def measured(
        self, config: PruningConfig, prompts: asking.Batch, references: Sequence[Reference], encode: float
    ) -> list[dict[str, Any]]:
        """Answer encoded prompts and measure: one forward for the prompt, and one for the reference's answer."""
        rows = []
        with config(self.model, processor=self.processor) as handle, torch.inference_mode():
            for row, reference in enumerate(references):
                batch, ids, start = asking.part(prompts, row), reference.ids, now(self.model.device)
                out = handle.forward(batch.images, **batch.inputs, use_cache=True, logits_to_keep=1)
                seconds, image = now(self.model.device) - start, handle.last[0]
                cached, logits = cache_bytes(out.past_key_values.layers), out.logits[0, -1:]
                if len(ids) > 1:
                    mask = batch.input_ids.new_ones(1, batch.input_ids.shape[1] + len(ids) - 1)
                    more = {"past_key_values": out.past_key_values, "attention_mask": mask, "use_cache": True}
                    logits = torch.cat([logits, self.model(input_ids=ids[None, :-1], **more).logits[0]])
                found = logits.float().log_softmax(-1)
                if found.isnan().any():
                    raise ValueError("the model's logits are not numbers")
                first = (found.argmax(-1) == ids).float()
                same = bool(first.all()) and reference.plain
                text = reference.text if same else self.answer(handle, prompts, row).text
                share = reference.first.exp()
                values = {
                    "exact": float(text == reference.text),
                    "agreement": float(normalize_answer(text) == normalize_answer(reference.text)),
                    "tokens": float(first.mean()),
                    "logprob": float(found.gather(1, ids[:, None]).mean()),
                    "kl": float((share * (reference.first - found[0])).nan_to_num().sum().clamp(min=0)),
                    "encode": encode,
                    "seconds": seconds,
                    "kv_bytes": cached,
                    "visual_tokens": image.kept if image.average is None else image.average,
                    "unpruned_tokens": image.placeholders,
                }
                if reference.clean is not None:
                    values["clean"] = float(normalize_answer(text) == normalize_answer(reference.clean))
                rows.append({"answer": text, "values": values})
        return rows

    def summary(self, config: PruningConfig, measure: Measure, finalist: bool = True) -> TunedCandidate:
        """Average what is known of a candidate, first over the questions of an image."""
        found = [[self.known.get((key(config), image, text)) for text in asked] for image, asked in self.seen]
        images = [records for own in found if (records := [one for one in own if one is not None])]
        count = len(images)
        if count == 1:  # then questions are what is drawn
            images = [[one] for one in images[0]]
        error = next((one.error for own in images for one in own if one.error), None)
        if error or not images:
            return TunedCandidate(config, config.method.name, 0, Estimate(0, None), {}, False, error)
        names = images[0][0].values
        table = {name: np.array([np.mean([one.values[name] for one in own]) for own in images]) for name in names}
        time = np.median(table.pop("encode")) + np.median(table.pop("seconds"))
        means = {name: round(float(own.mean()), 6) for name, own in table.items()} | {"first_token": float(time)}
        (quality,) = estimates(table[measure][None])
        return TunedCandidate(config, config.method.name, count, quality, means, finalist)
