"""Measure what pruning gains: times of every stage, memory, KV cache and FLOPs, unpruned and at some budgets in turns.

With fewer layers than the model has, what the language model's layers take and hold is scaled to all of them: each
layer is timed, and stands for those of its kind. The rest is measured. FLOPs are counted for the whole model.
"""

import functools
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from clustrs import palette, validation
from clustrs.models.adapters.base import PatchGrid, get_adapter
from clustrs.models.ask import chat_prompt, prepare_batch
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import cache_bytes, count_cost
from clustrs.models.scoring import now, timing
from clustrs.models.shapes import weight_bytes
from clustrs.tables import Row, Table, Value, to_csv
from clustrs.validation import write_whole

STAGES = ("vision", "scoring", "selection", "prefill", "other")  # together they are the time to the first token
TIMES = (*STAGES, "first token", "decode per token", "end to end")
SCALED = ("prefill", "first token", "decode per token", "end to end")  # with the language model's layers in them
COUNTED = ("vision", "projector", "prefill", "decode")
COMPARED = ("first token", "end to end")
BUSY = 0.3  # load average for each core above which times are disturbed


@dataclass(frozen=True)
class Measured:
    """One budget with one batch size: seconds of each turn, bytes, FLOPs. `keep` is None for the unpruned model."""

    batch: int
    keep: float | None
    visual_tokens: int
    seconds: Mapping[str, Sequence[float]]
    peak_bytes: int
    kv_bytes: int
    flops: Mapping[str, int]

    @property
    def label(self) -> str:
        return "all" if self.keep is None else f"{self.keep:g}"


@dataclass(frozen=True)
class BenchResult:
    """Measurements of a model unpruned and at some budgets; `load` is the load average before the start."""

    model: str
    pruning: Mapping[str, Any]
    machine: str
    load: float | None
    layers: int
    layers_run: int
    image: tuple[int, int]
    text_tokens: int
    new_tokens: int
    repeats: int
    rows: tuple[Measured, ...]

    @property
    def scaled(self) -> str:
        return ", extrapolated" if self.layers_run < self.layers else ""

    def speedups(self, row: Measured, part: str) -> list[float]:
        whole = next(one for one in self.rows if one.batch == row.batch and one.keep is None)
        return [before / after for before, after in zip(whole.seconds[part], row.seconds[part], strict=True)]

    def quantities(self, row: Measured) -> dict[str, list[float]]:
        """Return everything that is shown of a row, by name and unit: one value for each turn, or one alone."""
        found: dict[str, list[float]] = {"visual tokens": [row.visual_tokens]}
        for part in TIMES:
            found[f"{part}, ms{self.scaled if part in SCALED else ''}"] = [1e3 * one for one in row.seconds[part]]
            if part in COMPARED:
                found[f"{part}, x faster{self.scaled}"] = self.speedups(row, part)
        found[f"peak memory, MiB{self.scaled}"] = [row.peak_bytes / 2**20]
        found[f"KV cache, MiB{self.scaled}"] = [row.kv_bytes / 2**20]
        return found | {f"{part}, GFLOP": [count / 1e9] for part, count in row.flops.items()}

    def heading(self) -> str:
        cut = f"EXTRAPOLATED from {self.layers_run} of {self.layers} layers of the language model; "
        load = "" if self.load is None else f", load average before {self.load:.1f}"
        turns = f"medians of {self.repeats} turns, with their range" if self.repeats > 1 else "one turn"
        return (
            f"{self.model}: {cut if self.scaled else ''}{self.machine}{load}; image of {self.image[0]} x "
            f"{self.image[1]} pixels, {self.text_tokens} text tokens, {self.new_tokens} new tokens; {turns}"
        )

    def tables(self) -> list[Table]:
        """Return a table for each batch size, with a column for each budget; what is extrapolated says so."""
        tables = []
        for batch in dict.fromkeys(row.batch for row in self.rows):
            rows = {row.label: self.quantities(row) for row in self.rows if row.batch == batch}
            names = next(iter(rows.values()))
            lines = [Row((name,), tuple(_spread(row[name]) for row in rows.values())) for name in names]
            tables.append(Table(f"batch {batch}", (f"batch {batch}, keep",), tuple(rows), tuple(lines)))
        return tables

    def sentence(self) -> str:
        """Say where the unpruned model's time goes, and what pruning can gain at most."""
        whole = self.rows[0]
        faster = [(median(self.speedups(row, "first token")), row) for row in self.rows if row.batch == whole.batch]
        speed, best = max(faster, key=lambda pair: pair[0])
        first, vision, prefill = (median(whole.seconds[part]) for part in ("first token", "vision", "prefill"))
        shares = sorted([(vision / first, "the vision tower"), (prefill / first, "the prefill")], reverse=True)
        where = " and ".join(f"{name} takes {100 * share:.0f} %" for share, name in shares)
        most = f"pruning, which shortens the prefill, can make it at most {first / (first - prefill):.2g} x faster"
        if self.pruning["crops"] == "base":
            most = "pruning shortens the prefill, the base crop alone shortens the tower's time"
        measured = f"measured {speed:.2g} x with {best.visual_tokens} visual tokens"
        return f"{where} of the unpruned {first:.3g} s to the first token{self.scaled}: {most}; {measured}"

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def save(self, folder: Path) -> None:
        """Write bench.json, bench.csv (medians) and bench.png (stages until the first token, stacked)."""
        folder.mkdir(parents=True, exist_ok=True)
        medians = ((row.batch, row.label, *map(median, self.quantities(row).values())) for row in self.rows)
        heads = ("model", "batch", "keep", *self.quantities(self.rows[0]))
        write_whole(folder / "bench.json", self.to_json())
        write_whole(folder / "bench.csv", to_csv([heads, *((self.model, *row) for row in medians)]))
        self.plot(folder / "bench.png")

    def plot(self, path: Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        batches = list(dict.fromkeys(row.batch for row in self.rows))
        figure = Figure(figsize=(5.2 * len(batches), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axis, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
            rows = [row for row in self.rows if row.batch == batch]
            tops = [0.0] * len(rows)
            for part, color in zip(STAGES, palette.SERIES, strict=True):
                heights = [median(row.seconds[part]) for row in rows]
                axis.bar([row.label for row in rows], heights, bottom=tops, color=color, label=part)
                tops = [top + height for top, height in zip(tops, heights, strict=True)]
            for place, top in enumerate(tops):
                axis.annotate(f"{top:.3g} s", (place, top), ha="center", va="bottom")
            axis.margins(y=0.1)
            axis.set(xlabel="visual tokens kept", ylabel=f"seconds to the first token{self.scaled}")
            axis.set_title(f"{self.model}, batch {batch}{self.scaled}", fontsize=9)
        names = figure.axes[0].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=110)


def _spread(values: Sequence[float]) -> Value:
    middle, *bounds = (
        f"{one:.3g}" if one < 100 else f"{one:.0f}" for one in (median(values), min(values), max(values))
    )
    return Value(middle, f"[{', '.join(bounds)}]" if len(values) > 1 else "")


def describe_machine(model: Any) -> str:
    kind, threads = model.device.type, torch.get_num_threads()
    name = torch.cuda.get_device_name(model.device) if kind == "cuda" else kind.upper()
    name += f", {threads} thread{'s' * (threads > 1)}" if kind == "cpu" else ""
    return f"{name}, {str(model.dtype).removeprefix('torch.')}"


def busy_load() -> tuple[float | None, bool]:
    """Return the load average of the last minute, where the system has one, and whether it disturbs measurements."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return load, load is not None and load > BUSY * (os.cpu_count() or 1)


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes that the tensors made in a block held at once; a view holds what it looks at."""

    now = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage.nbytes())
        return out

    def _drop(self, size: int) -> None:
        self.now -= size


@dataclass
class Trace:
    """What hooks see of a `generate` call in which each layer of the language model stands for `scales` of them."""

    scales: Sequence[float]
    memory: PeakBytes | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of events, by name
    cache: list[int] = field(default_factory=list)  # bytes of each layer after the prompt
    before: int = 0  # most bytes held before the language model began

    @contextmanager
    def record(self, model: Any) -> Iterator[None]:
        decoder, inner, device = model.get_decoder(), get_adapter(model).inner, model.device
        original = inner.get_image_features

        def note(event: str) -> Any:
            return lambda *_: self.times[event].append(now(device))

        @functools.wraps(original)  # generate reads its signature
        def get_image_features(*args: Any, **kwargs: Any) -> Any:
            note("vision")()
            out = original(*args, **kwargs)
            note("features")()
            return out

        def split_memory(*_: Any) -> None:
            if self.memory and not self.cache:
                self.before, self.memory.peak = self.memory.peak, self.memory.now

        def see_cache(_: Any, __: Any, out: Any) -> None:
            self.cache = self.cache or [cache_bytes([layer]) for layer in out.past_key_values.layers]

        layers = decoder.layers if max(self.scales) > 1 else ()
        before = [(decoder, split_memory), (decoder, note("prompt")), *((layer, note("enter")) for layer in layers)]
        after = [(model.get_output_embeddings(), note("logits")), (decoder, see_cache)]
        with ExitStack() as hooks:
            for module, hook in before:
                hooks.enter_context(module.register_forward_pre_hook(hook))
            for module, hook in (*after, *((layer, note("leave")) for layer in layers)):
                hooks.enter_context(module.register_forward_hook(hook))
            inner.__dict__["get_image_features"] = get_image_features
            hooks.callback(inner.__dict__.pop, "get_image_features")
            yield

    @property
    def kv_bytes(self) -> int:
        return round(sum(scale * size for scale, size in zip(self.scales, self.cache, strict=True)))

    def held(self) -> int:
        """Return the most bytes that were held at once beside the weights, with the cache of missing layers."""
        assert self.memory is not None
        return max(self.before, self.memory.peak + self.kv_bytes - sum(self.cache))

    def seconds(self, begin: float, end: float, stages: Mapping[str, float] | None) -> dict[str, float]:
        """Return the seconds of all parts, those of missing layers added; the unpruned model has no `stages`."""
        times, logits = self.times, self.times["logits"]
        if stages is None:
            stages = {"vision": times["features"][0] - times["vision"][0], "scoring": 0.0, "selection": 0.0}
        spent = [leave - enter for enter, leave in zip(times["enter"], times["leave"], strict=True)]
        steps = [spent[i * len(self.scales) : (i + 1) * len(self.scales)] for i in range(len(logits))]
        missing = [sum((scale - 1) * one for scale, one in zip(self.scales, step, strict=False)) for step in steps]
        prefill, first = logits[0] - times["prompt"][0], logits[0] - begin
        return {
            **stages,
            "prefill": prefill + missing[0],
            "other": first - prefill - sum(stages.values()),
            "first token": first + missing[0],
            "decode per token": (logits[-1] - logits[0]) / (len(logits) - 1) + mean(missing[1:]),
            "end to end": end - begin + sum(missing),
        }


def image_size(inputs: Mapping[str, Any], batch: int, base: bool) -> dict[str, Any]:
    """Return the arguments of `count_cost` that describe one image; `base`: its base crop alone."""
    if "image_grid_thw" in inputs:
        frames, height, width = inputs["image_grid_thw"][0].tolist()
        return {"grid": PatchGrid(height, width, frames)}
    if "image_position_ids" in inputs:
        width, height = (inputs["image_position_ids"][0].amax(0) + 1).tolist()
        return {"grid": PatchGrid(height, width, padded=inputs["pixel_values"].shape[1])}
    return {"crops": 1 if base else inputs["pixel_values"].flatten(0, -4).shape[0] // batch}


def bench_model(
    model: Any,
    processor: Any,
    image: Image.Image,
    question: str,
    configs: Sequence[PruningConfig],
    *,
    name: str,
    whole: Any = None,
    scales: Sequence[float] | None = None,
    new_tokens: int = 32,
    repeats: int = 5,
    batches: Sequence[int] = (1,),
    load: float | None = None,
) -> BenchResult:
    """Measure a model unpruned and with each configuration of one method, in turns, after a turn that counts memory.

    A model with fewer layers comes with the config of the `whole` one, and the number of layers that each of its own
    stands for (`scales`), as `cut_layers` returns them. Every prompt of a batch has the same image.
    """
    validation.integer("new_tokens", new_tokens, 2)
    validation.integer("repeats", repeats, 1)
    adapter, whole = get_adapter(model), whole or model.config
    scales = scales or [1.0] * len(model.get_decoder().layers)
    if max(scales) > 1 and any(config.method.parts()[1] for config in configs):
        raise ValueError("layers must be all for a method inside the language model: its layers read different tokens")
    text, rows = chat_prompt(processor, question), list[Measured]()
    weights = weight_bytes(whole, model.dtype)[0] if max(scales) > 1 else sum(p.nbytes for p in model.parameters())

    def generate(inputs: Any, config: PruningConfig | None, trace: Trace) -> tuple[dict[str, float], int]:
        """Return seconds by part, and the visual tokens that were kept; 0 for the unpruned model."""
        attached = nullcontext() if config is None else config(model, processor=processor)
        with attached as handle, trace.record(model), timing(), torch.inference_mode():
            begin = now(model.device)
            with trace.memory or nullcontext():
                model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
            end = now(model.device)
        bar.update()
        if (calls := len(trace.times["logits"])) != new_tokens:
            raise RuntimeError(f"the language model was called {calls} times for {new_tokens} tokens")
        if handle is None:
            return trace.seconds(begin, end, None), 0
        return trace.seconds(begin, end, handle.seconds), handle.last[0].kept

    variants: list[PruningConfig | None] = [None, *configs]
    with tqdm(total=len(batches) * len(variants) * (repeats + 1), unit="call", disable=None) as bar:
        for batch in batches:
            inputs = prepare_batch(model, processor, [(image, text)] * batch)
            visual = int((inputs["input_ids"] == adapter.placeholder("image")).sum()) // batch
            text_tokens = inputs["input_ids"].shape[1] - visual
            for budget in [one.method.keep for one in configs]:
                if isinstance(budget, int) and budget >= visual:
                    raise ValueError(f"keep must be below the image's {visual} visual tokens, got {budget}")
            traces = [Trace(scales, PeakBytes()) for _ in variants]
            kept = [
                generate(inputs, config, trace)[1] or visual for config, trace in zip(variants, traces, strict=True)
            ]
            turns: list[list[dict[str, float]]] = [[] for _ in variants]
            for turn in range(repeats):
                for index in [(place + turn) % len(variants) for place in range(len(variants))]:
                    turns[index].append(generate(inputs, variants[index], Trace(scales))[0])
            for config, taken, trace, tokens in zip(variants, turns, traces, kept, strict=True):
                inside = config.method if config and config.method.parts()[1] else None
                size = image_size(inputs, batch, config is not None and config.crops == "base")
                cost = count_cost(
                    whole, text_tokens, visual if inside else tokens, dtype=model.dtype, method=inside, **size
                )
                flops = {part: batch * getattr(cost, part) for part in COUNTED}
                seconds = {part: [one[part] for one in taken] for part in TIMES}
                keep = config.method.keep if config else None
                rows.append(Measured(batch, keep, tokens, seconds, weights + trace.held(), trace.kv_bytes, flops))
    return BenchResult(
        model=name,
        pruning=configs[0].to_dict(),
        machine=describe_machine(model),
        load=load,
        layers=round(sum(scales)),
        layers_run=len(scales),
        image=image.size,
        text_tokens=text_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        rows=tuple(rows),
    )
