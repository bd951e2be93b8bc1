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
from typing import Any, get_args

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
from clustrs.evaluation.report.tuning import Measure, TunedCandidate, TuningResult, rank
from clustrs.evaluation.runner import one_line, printable
from clustrs.evaluation.store import drop_torn_line, encode_record, locked, read_records
from clustrs.evaluation.tasks import has_surrogates, normalize_answer
from clustrs.models import ask as asking
from clustrs.models.attach import Handle
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import CACHED
from clustrs.models.scoring import now
from clustrs.pruners import NoPruning, list_methods, variant_labels
from clustrs.validation import Attention, Positions, PromptTemplate

QUESTIONS = ("Describe the image.", "What is in the image?", "What text is in the image?")
KEEPS = (0.5, 0.25, 0.125, 0.0625, 0.03125)
LEFT_OUT = ("none", "random", "grid", "denoise")  # unless they are asked for
BLANK = 3  # images without any answer after which a run stops
UNPRUNED = PruningConfig(method=NoPruning())
ImageSource = str | os.PathLike[str] | Image.Image
Item = tuple[ImageSource, list[str]]  # an image and its questions


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one candidate on one question. A failed one has an `error`, and nothing else that is measured.

    `tokens` is the share of the reference's tokens that come first under the pruned model, `logprob` their mean
    log-probability, `kl` that of the first token from the unpruned model's. `seconds` are selection and prefill.
    """

    setting: str
    candidate: str
    image: str
    question: str
    reference: str
    encode_seconds: float
    answer: str | None = None
    exact: float | None = None
    agreement: float | None = None
    clean: float | None = None
    tokens: float | None = None
    logprob: float | None = None
    kl: float | None = None
    seconds: float | None = None
    kv_bytes: float | None = None
    visual_tokens: float | None = None
    unpruned_tokens: float | None = None
    error: str | None = None


MEANS = ("exact", "agreement", "clean", "tokens", "logprob", "kl", "kv_bytes", "visual_tokens", "unpruned_tokens")


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
    validation.check(validation.is_number(target) and 0 < target <= 1, "target", "a number above 0, at most 1", target)
    validation.choice("measure", measure, get_args(Measure))
    validation.integer("max_new_tokens", max_new_tokens, 1)
    if minutes is not None:
        validation.above("minutes", minutes, 0)
    methods = methods or [name for name in list_methods("encoder") if name not in LEFT_OUT]
    described = [one for one in expand_methods(methods, keep) if one["name"] != "none"]
    places: list[dict[str, Any]] = [{"positions": where, "attention": how} for where in positions for how in attention]
    configs = [PruningConfig(method=clustrs.from_dict(one), **place) for one in described for place in places]
    configs.sort(key=lambda config: -config.method.keep)
    validation.check(bool(configs), "methods", "at least one method that prunes", methods)
    sources: list[Any] = [*(find_images(Path(images)) if isinstance(images, str | os.PathLike) else images)]
    validation.check(bool(sources), "images", "at least one image", sources)
    asked = list(QUESTIONS if questions is None else questions)
    per_image: list[list[str]] = [[*one] for one in asked if not isinstance(one, str)]
    per_image = per_image or [asked] * len(sources)  # type: ignore[list-item]
    if len(per_image) != len(sources) or not all(per_image):
        raise ValueError("questions must be texts, or a list of at least one text for each image")
    for text in dict.fromkeys(text for own in per_image for text in own):
        if not isinstance(text, str) or has_surrogates(text):
            raise ValueError(f"questions must be texts, got {validation.excerpt(text)}")
        asking.chat_prompt(processor, text, prompt_template)
    corruption = Corruption.parse(corrupt) if corrupt else None
    decisive = (clustrs.__version__, torch.__version__, fingerprint(model), max_new_tokens, prompt_template, corrupt)
    setting = hashlib.sha256(json.dumps([*decisive, seed]).encode()).hexdigest()[:16]
    records = {need for config in configs for need in config.method.requirements()}
    tuner = _Tuner(model, processor, max_new_tokens, prompt_template, corruption, seed, setting, measure, records)
    with ExitStack() as stack:
        if output is not None:
            Path(output).mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(Path(output) / "lock", f"folder {str(output)!r}"))
            tuner.open(Path(output) / "tune.jsonl")
        order = list(range(len(sources)))
        random.Random(0).shuffle(order)
        deadline = math.inf if minutes is None else monotonic() + 60 * minutes
        finalists, complete = tuner.search(configs, [(sources[i], per_image[i]) for i in order], deadline, progress)
    facts = {"model": str(getattr(model.config, "_name_or_path", "")), "images": len(tuner.seen), "corrupt": corrupt}
    facts |= {"questions": len({text for own in per_image for text in own}), "target": target, "measure": measure}
    labels = variant_labels([config.method for config in configs])
    if len(places) > 1:
        labels = [f"{one} {c.positions} {c.attention}" for one, c in zip(labels, configs, strict=True)]
    results = []
    for config, label in zip(configs, labels, strict=True):
        one = tuner.summary(config, label, config in finalists)
        known = {name: round(value, 6) for name, value in one.means.items()}
        noted = {**facts, **known, "images": one.images, "interval": [one.quality.low, one.quality.high]}
        results.append(replace(one, config=replace(config, tuned_on=noted)) if one.images else one)
    reached = [one for one in results if one.finalist and one.images and rank(one)[0] >= target]
    cost = [(one.means["visual_tokens"], *(-value for value in rank(one))) for one in reached]
    recommended = reached[cost.index(min(cost))] if reached else None
    unpruned = tuner.summary(UNPRUNED, "none", True)
    result = TuningResult(tuple(results), unpruned, recommended, target, measure, complete, tuner.unreadable)
    if output is not None:
        result.save(output)
    return result


def find_images(folder: Path) -> list[Path]:
    """Return the image files of a folder, by name."""
    if not os.path.isdir(folder):
        raise ValueError(f"images must be a folder, got {str(folder)!r}")
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file())
    if not found:
        raise ValueError(f"images must be a folder with images, got {str(folder)!r}, which has none")
    return found


def fingerprint(model: Any) -> str:
    """Return a checksum of a model's configuration and of a few numbers of every weight."""
    checksum = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        checksum.update(f"{name}{weight.flatten()[:4].float().tolist()}".encode())
    return checksum.hexdigest()


@dataclass(frozen=True)
class _Reference:
    """Answer of the unpruned model. `plain` says that generation chose the likeliest tokens, unchanged by penalties."""

    ids: Tensor
    text: str
    first: Tensor
    plain: bool
    clean: str | None = None


@dataclass
class _Tuner:
    model: Any
    processor: Any
    max_new_tokens: int
    template: PromptTemplate
    corruption: Corruption | None
    seed: int
    setting: str
    measure: Measure
    records: set[str]  # what the candidates need of the vision tower
    known: dict[tuple[str, str, str], Measured] = field(default_factory=dict)
    seen: list[tuple[str, list[str]]] = field(default_factory=list)  # checksums of images, and their questions
    unreadable: dict[str, str] = field(default_factory=dict)
    file: Path | None = None
    warm: bool = False

    def open(self, file: Path) -> None:
        """Read the measurements of earlier calls, and write further ones there."""
        self.file = file
        if file.exists():
            drop_torn_line(file)
            records = (record for _, record in read_records(file, Measured) if record.setting == self.setting)
            self.known = {(one.candidate, one.image, one.question): one for one in records}

    def search(
        self, configs: Sequence[PruningConfig], items: Sequence[Item], deadline: float, bar: bool
    ) -> tuple[list[PruningConfig], bool]:
        """Measure by successive halving; return those who were left, and whether all images were seen."""
        from tqdm import tqdm

        groups: dict[float, list[PruningConfig]] = {}
        for config in configs:
            groups.setdefault(config.method.keep, []).append(config)
        rounds = 1 + min(math.ceil(math.log2(max(map(len, groups.values())))), int(math.log2(len(items))))
        ends = [math.ceil(len(items) / 2 ** (rounds - 1 - i)) for i in range(rounds)]
        sizes = [sum(math.ceil(len(group) / 2**i) for group in groups.values()) for i in range(rounds)]
        total = sum(size * (end - before) for size, end, before in zip(sizes, ends, [0, *ends], strict=False))
        with tqdm(total=total, desc="tuning", unit="measurement", disable=not bar, dynamic_ncols=True) as shown:
            for i, end in enumerate(ends):
                for source, questions in items[ends[i - 1] if i else 0 : end]:
                    alive = [config for group in groups.values() for config in group]
                    if not self.see(source, questions, alive, deadline, shown.update):
                        return alive, False
                for budget, group in groups.items() if end < len(items) else ():
                    ranked = sorted((self.summary(one, "", True) for one in group), key=rank, reverse=True)
                    groups[budget] = [one.config for one in ranked[: math.ceil(len(group) / 2)]]
        if not self.seen:
            name, error = next(iter(self.unreadable.items()))
            raise ValueError(f"images: none of {len(self.unreadable)} could be read; {name}: {error}")
        self.check_answers()
        return [config for group in groups.values() for config in group], True

    def see(
        self, source: ImageSource, questions: list[str], configs: Sequence[PruningConfig], deadline: float, done: Any
    ) -> bool:
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
        missing = [c for c in configs if any((_key(c), digest, text) not in self.known for text in questions)]
        self.seen.append((digest, questions))
        done(len(configs) - len(missing))
        if not missing:
            return True
        if monotonic() > deadline and len(self.seen) > 1:
            self.seen.pop()
            return False
        start = now(self.model.device)
        parts = self.encode(shown, questions)
        seconds = now(self.model.device) - start
        originals = self.encode(image, questions) if self.corruption else []
        with UNPRUNED(self.model) as handle, torch.inference_mode():
            references = [self.answer(handle, part) for part in parts]
            if originals:
                cleans = [self.answer(handle, part).text for part in originals]
                references = [replace(one, clean=text) for one, text in zip(references, cleans, strict=True)]
        if not self.warm:  # the first call pays for what is set up once
            self.measured(UNPRUNED, parts[:1], references[:1])
            self.warm = True
        facts: dict[str, Any] = {"setting": self.setting, "image": digest, "encode_seconds": seconds}
        for config in (UNPRUNED, *missing):
            if monotonic() > deadline and len(self.seen) > 1:
                return False
            rows: list[dict[str, Any]]
            try:
                rows = self.measured(config, parts, references)
            except Exception as error:  # methods and models raise many kinds
                if config is UNPRUNED:
                    raise
                rows = [{"error": printable(one_line(error))}] * len(parts)
            records = [
                Measured(**facts, candidate=_key(config), question=text, reference=one.text, **row)
                for text, one, row in zip(questions, references, rows, strict=True)
            ]
            self.known |= {(one.candidate, one.image, one.question): one for one in records}
            if self.file is not None:
                with self.file.open("ab") as file:
                    file.write(b"".join(map(encode_record, records)))
                    file.flush()
                    os.fsync(file.fileno())
            done(config is not UNPRUNED)
        if len(self.seen) == BLANK:
            self.check_answers()
        return True

    def check_answers(self) -> None:
        if not any(one.reference for one in self.known.values()):
            raise ValueError("the unpruned model answers nothing: ask other questions, or check prompt_template")

    def encode(self, image: Image.Image, questions: list[str]) -> list[asking.Batch]:
        prompts = [(0, asking.chat_prompt(self.processor, text, self.template)) for text in questions]
        batch = asking.encode(self.model, self.processor, [image], prompts, records=self.records)
        return [asking.part(batch, row) for row in range(len(prompts))]

    def answer(self, handle: Handle, batch: asking.Batch) -> _Reference:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **batch.along}
        greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": self.max_new_tokens}
        kept = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        out = handle.generate(batch.images, **inputs, **greedy, **kept)
        ids = out.sequences[0, batch.input_ids.shape[1] :]
        plain = all(torch.equal(score, logits) for score, logits in zip(out.scores, out.logits, strict=True))
        text = printable(self.processor.decode(ids, skip_special_tokens=True).strip())
        return _Reference(ids, text, out.logits[0][0].float().log_softmax(-1), plain)

    def measured(
        self, config: PruningConfig, parts: Sequence[asking.Batch], references: Sequence[_Reference]
    ) -> list[dict[str, Any]]:
        """Measure a candidate on encoded prompts: one forward for the prompt, and one for the reference's answer."""
        rows = []
        with config(self.model, processor=self.processor) as handle, torch.inference_mode():
            for batch, reference in zip(parts, references, strict=True):
                device, ids = batch.input_ids.device, reference.ids
                inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **batch.along}
                start = now(device)
                out = handle.forward(batch.images, **inputs, use_cache=True, logits_to_keep=1)
                seconds, image = now(device) - start, handle.last[0]
                held = [getattr(layer, name, None) for layer in out.past_key_values.layers for name in CACHED]
                kv_bytes = sum(one.nbytes for one in held if isinstance(one, Tensor))
                logits = out.logits[0, -1:]
                if len(ids) > 1:
                    whole = torch.ones(1, batch.input_ids.shape[1] + len(ids) - 1, dtype=torch.long, device=device)
                    cache = out.past_key_values
                    out = self.model(
                        input_ids=ids[None, :-1], past_key_values=cache, attention_mask=whole, use_cache=True
                    )
                    logits = torch.cat([logits, out.logits[0]])
                found = logits.float().log_softmax(-1)
                first = (found.argmax(-1) == ids).float()
                text = reference.text if bool(first.all()) and reference.plain else self.answer(handle, batch).text
                said = normalize_answer(text)
                rows.append(
                    {
                        "answer": text,
                        "exact": float(text == reference.text),
                        "agreement": float(said == normalize_answer(reference.text)),
                        "clean": None if reference.clean is None else float(said == normalize_answer(reference.clean)),
                        "tokens": float(first.mean()),
                        "logprob": float(found.gather(1, ids[:, None]).mean().nan_to_num()),
                        "kl": float(
                            (reference.first.exp() * (reference.first - found[0])).nan_to_num().sum().clamp(min=0)
                        ),
                        "seconds": seconds,
                        "kv_bytes": kv_bytes,
                        "visual_tokens": image.kept if image.average is None else image.average,
                        "unpruned_tokens": image.placeholders,
                    }
                )
        return rows

    def summary(self, config: PruningConfig, label: str, finalist: bool) -> TunedCandidate:
        """Average what is known of a candidate, first over the questions of an image."""
        found = [[self.known.get((_key(config), image, text)) for text in asked] for image, asked in self.seen]
        images = [records for own in found if (records := [one for one in own if one is not None])]
        if len(images) == 1:  # then questions are what is drawn
            images = [[one] for one in images[0]]
        error = next((one.error for own in images for one in own if one.error), None)
        if error or not images:
            return TunedCandidate(config, label, 0, Estimate(0, None), {}, math.nan, False, error)
        values = {
            name: np.array([np.mean([getattr(one, name) for one in own]) for own in images])
            for name in MEANS
            if name != "clean" or self.corruption
        }
        (quality,) = estimates(values[self.measure][None])
        means = {name: float(own.mean()) for name, own in values.items()}
        seconds = np.array([(one.seconds, one.encode_seconds) for own in images for one in own])
        count = sum(any(one is not None for one in own) for own in found)
        return TunedCandidate(config, label, count, quality, means, float(np.median(seconds, 0).sum()), finalist)


def _key(config: PruningConfig) -> str:
    return json.dumps({"method": config.method.to_dict(), **config.options()}, sort_keys=True)
