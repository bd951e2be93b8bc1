"""Time an image until the first new token, stage by stage, with and without pruning.

Two models with the shapes of published ones and random weights, in float32: LLaVA-OneVision with its 0.5B language
model, and LLaVA-1.5-7B. Of the latter's 32 decoder layers only as many are built as fit in memory (--gib). The time
spent in the layers and the bytes of their KV cache are then scaled to 32, the rest (embedding, last norm, logits) is
not: the output says where. Time does not depend on what the weights are; answers mean nothing here.

All budgets take turns, each in a `generate` call with the method attached, after one call that is not counted.
"Vision" is the tower and the projector; "of the tower" compares scoring and selection with the tower alone. FLOPs and
"KV counted" come from `clustrs.models.costs`, for the full number of layers and the crops that ran. Positions are
compact and attention is plain.

With --attention N nothing else is measured: prefill time and peak memory of plain and proportional attention with 64
visual tokens and 64 of text, N times in turns, on photo-llava and on LLaVA-OneVision-0.5B's language model.

Writes end_to_end.json, end_to_end.md and end_to_end.png to the output folder.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.initialization import no_init_weights

from clustrs import get_method, palette
from clustrs.models.ask import call_seconds
from clustrs.models.costs import count_cost
from clustrs.models.load import load_model
from clustrs.models.scoring import StageTimer, timing

TEXT_TOKENS, NEW_TOKENS = 40, 8
PARTS = ("vision", "scoring", "selection", "prefill")
PREFILL_TARGET = 5.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A published model's shape. `budgets` starts with all tokens; `shares` are the budgets with a limit in percent."""

    name: str
    model: Any
    config: Callable[[], Any]
    side: int
    crops: int
    placeholders: int
    budgets: tuple[int, ...]
    shares: dict[int, float]
    repeats: int
    options: dict[str, str]


def onevision_config() -> LlavaOnevisionConfig:
    without_head: dict[str, Any] = {"vision_use_head": False}
    tower = SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=26,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
        **without_head,
    )
    text = Qwen2Config(
        vocab_size=152000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlavaOnevisionConfig(vision_config=tower, text_config=text, tie_word_embeddings=True)


def llava_config() -> LlavaConfig:
    tower = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlavaConfig(vision_config=tower, text_config=text)


SHAPES = {
    "onevision": Shape(
        name="LLaVA-OneVision-0.5B",
        model=LlavaOnevisionForConditionalGeneration,
        config=onevision_config,
        side=384,
        crops=2,
        placeholders=729 + 27 * 28,  # base crop, and a grid of one crop with a newline in every row
        budgets=(729, 180, 50, 16),
        shares={16: 5.0, 180: 10.0},
        repeats=3,
        options={"crops": "base"},
    ),
    "llava": Shape(
        name="LLaVA-1.5-7B",
        model=LlavaForConditionalGeneration,
        config=llava_config,
        side=336,
        crops=1,
        placeholders=576,
        budgets=(576, 144, 50, 16),
        shares={16: 5.0, 144: 10.0},
        repeats=2,
        options={},
    ),
}


def layers_that_fit(shape: Shape, gib: float) -> int:
    """Return the number of decoder layers that fit in `gib` GiB of float32 weights beside the rest, at most all."""
    with torch.device("meta"):
        model = shape.model(shape.config())
    every = model.model.language_model.layers
    weights = {id(p): p.numel() * 4 for p in model.parameters()}
    layer = sum(p.numel() * 4 for p in every[0].parameters())
    fit = int((gib * 2**30 - sum(weights.values()) + layer * len(every)) // layer)
    return max(0, min(fit, len(every)))


def build(shape: Shape, layers: int) -> Any:
    """The model with `layers` decoder layers: small random weights, biases 0, norms 1."""
    config = shape.config()
    config.text_config.num_hidden_layers = layers
    if getattr(config.text_config, "layer_types", None) is not None:
        config.text_config.layer_types = config.text_config.layer_types[:layers]
    with no_init_weights():
        model = shape.model(config).eval()
    model.tie_weights()
    noise = torch.randn(2**22 - 3, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            for block in weight.view(-1).split(len(noise)):  # drawing billions of numbers would take minutes
                block.copy_(noise[: len(block)])
    model.generation_config.pad_token_id = 0
    return model


class Stopwatch:
    """Hooks around the tower, the decoder, its layers and the logits, that note the seconds of every call."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self.seconds: dict[str, list[float]] = {}
        self.crops = 0
        self.kv_bytes: list[int] = []
        self._since: dict[str, float] = {}
        self._hooks: list[Any] = []
        self._watch("tower", inner.vision_tower)
        self._watch("decoder", inner.language_model)
        for layer in inner.language_model.layers:
            self._watch("layer", layer)
        self._watch("logits", model.lm_head)
        self._hooks.append(inner.vision_tower.register_forward_hook(self._see_crops))
        self._hooks.append(inner.language_model.register_forward_hook(self._see_cache))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, part: str, module: nn.Module) -> None:
        def start(module: nn.Module, args: Any) -> None:
            self._since[part] = time.perf_counter()

        def stop(module: nn.Module, args: Any, out: Any) -> None:
            self.seconds.setdefault(part, []).append(time.perf_counter() - self._since[part])

        self._hooks += [module.register_forward_pre_hook(start), module.register_forward_hook(stop)]

    def _see_crops(self, module: nn.Module, args: Any, out: Any) -> None:
        self.crops += len(out.last_hidden_state)

    def _see_cache(self, module: nn.Module, args: Any, out: Any) -> None:
        parts = [part for layer in out.past_key_values.layers for part in (layer.keys, layer.values)]
        self.kv_bytes.append(sum(part.numel() * part.element_size() for part in parts))

    def decoder_seconds(self, scale: float) -> list[float]:
        """Seconds of each call of the language model (prefill, then one a token), with its layers' part scaled."""
        whole, logits = self.seconds["decoder"], self.seconds["logits"]
        size = len(self.seconds["layer"]) // len(whole)
        inside = [sum(self.seconds["layer"][i * size : (i + 1) * size]) for i in range(len(whole))]
        return [w - i + scale * i + last for w, i, last in zip(whole, inside, logits, strict=True)]


def prompt(shape: Shape, config: Any, length: int = TEXT_TOKENS) -> dict[str, Tensor]:
    """Some text around the placeholders of one random image."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(10, min(1000, config.text_config.vocab_size), (length,), generator=generator)
    image = torch.full((shape.placeholders,), config.image_token_id)
    ids = torch.cat([text[:8], image, text[8:]])[None]
    pixels = torch.randn(1, shape.crops, 3, shape.side, shape.side, generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if isinstance(config, LlavaOnevisionConfig):
        return inputs | {"pixel_values": pixels, "image_sizes": torch.tensor([[shape.side, shape.side]])}
    return inputs | {"pixel_values": pixels[:, 0]}


def ask(shape: Shape, model: Any, inputs: dict[str, Tensor], keep: int, scale: float) -> dict[str, Any]:
    """One generate call: seconds by part, bytes of the cache after prefill, and how many crops ran."""
    method = get_method("none") if keep == shape.budgets[0] else get_method("clustrs", keep=keep)
    with method(model, **shape.options, positions="compact", attention="plain") as handle, timing():
        watch = Stopwatch(model)
        try:
            model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        finally:
            watch.remove()
        seconds, image = dict(handle.seconds), handle.last[0]
    calls = watch.decoder_seconds(scale)
    if image.kept != keep or len(calls) != NEW_TOKENS:
        raise RuntimeError(f"{image.kept} tokens kept instead of {keep}, {len(calls)} calls of the language model")
    seconds |= {"tower": sum(watch.seconds["tower"]), "prefill": calls[0], "decode": statistics.median(calls[1:])}
    return {"method": method.name, "seconds": seconds, "kv_bytes": watch.kv_bytes[0], "crops": watch.crops}


def measure(shape: Shape, layers: int, repeats: int, bar: "tqdm[Any]") -> list[Row]:
    """Median milliseconds by part for every budget, in turns."""
    full = shape.config()
    scale = full.text_config.num_hidden_layers / layers
    bar.set_postfix_str(f"building {shape.name}")
    model = build(shape, layers)
    inputs = prompt(shape, model.config)
    bar.update()
    bar.set_postfix_str(shape.name)
    ask(shape, model, inputs, shape.budgets[-1], scale)
    bar.update()
    runs: dict[int, list[dict[str, Any]]] = {keep: [] for keep in shape.budgets}
    for _ in range(repeats):
        for keep, taken in runs.items():
            taken.append(ask(shape, model, inputs, keep, scale))
            bar.update()
    rows = []
    for keep, taken in runs.items():
        first = taken[0]
        names = ("tower", *PARTS, "decode")
        ms = {name: statistics.median(run["seconds"][name] for run in taken) * 1e3 for name in names}
        cost = count_cost(full, TEXT_TOKENS, keep, crops=first["crops"])
        row: Row = {"model": shape.name, "tokens": keep, "method": first["method"], "crops": first["crops"]}
        row |= {"ms": ms, "first_token_ms": sum(ms[part] for part in PARTS), "repeats": repeats}
        shares = [(run["seconds"]["scoring"] + run["seconds"]["selection"]) / run["seconds"]["tower"] for run in taken]
        row |= {"share_of_tower": statistics.median(shares), "kv_bytes": round(first["kv_bytes"] * scale)}
        row |= {"layers_run": layers, "layers": full.text_config.num_hidden_layers, "cost": asdict(cost)}
        row["runs"] = [run["seconds"] for run in taken]
        rows.append(row)
    return rows


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes that the tensors made in a block held at once; views count with what they look at."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or storage._cdata in known - self._holders.keys():  # a view of a weight
                continue
            self.now += 0 if storage._cdata in self._holders else storage.nbytes()
            self.peak = max(self.peak, self.now)
            self._holders[storage._cdata] = self._holders.get(storage._cdata, 0) + 1
            weakref.finalize(tensor, self._drop, storage._cdata, storage.nbytes())
        return out

    def _drop(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= size


def compare_attention(repeats: int) -> str:
    """Prefill milliseconds and peak memory of the language model with plain and with proportional attention."""
    lines = ["| model | attention | prefill ms | of plain | peak MiB | of plain |", "|:--|:--|--:|--:|--:|--:|"]
    shape, text = SHAPES["onevision"], 64
    embedded, _ = load_model("photo-llava")
    small = replace(SHAPES["llava"], name="photo-llava", side=embedded.config.vision_config.image_size)
    for which, model in ((small, embedded), (shape, build(shape, shape.config().text_config.num_hidden_layers))):
        inputs = prompt(which, model.config, text)
        encoded, results = None, {}
        kinds = {kind: {"positions": "original", "attention": kind} for kind in ("plain", "proportional")}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(repeats + 1):
            for kind, options in kinds.items():
                with get_method("clustrs", keep=64)(model, **which.options, **options) as handle, torch.no_grad():
                    timer = StageTimer(torch.device("cpu"))
                    encoded = encoded or handle.adapter.encode(dict(inputs), timer, handle.crops)
                    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
                    with call_seconds(model.get_decoder()) as calls:
                        handle.generate(encoded, **given, max_new_tokens=1, do_sample=False)
                    seconds[kind] += calls if turn else []
                    if not turn:
                        with PeakBytes() as memory:
                            handle.generate(encoded, **given, max_new_tokens=1, do_sample=False)
                        results[kind] = memory.peak / 2**20
        for kind in kinds:
            ms, plain = (1e3 * statistics.median(seconds[one]) for one in (kind, "plain"))
            shares = f"{ms / plain:.3f} | {results[kind]:.2f} | {results[kind] / results['plain']:.3f}"
            lines.append(f"| {which.name} | {kind} | {ms:.1f} | {shares} |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    times = "vision ms | scoring ms | selection ms | of the tower | prefill ms | first token ms | decode ms/token"
    counts = "vision GFLOP | prefill GFLOP | decode GFLOP | KV MiB | KV counted"
    lines = [f"| model | tokens | method | {times} | {counts} |", "|:--|--:|:--|" + "--:|" * 12]
    for row in rows:
        ms, cost = row["ms"], row["cost"]
        cells = [row["model"], str(row["tokens"]), row["method"], f"{ms['vision']:.0f}", f"{ms['scoring']:.1f}"]
        cells += [f"{ms['selection']:.1f}", f"{row['share_of_tower']:.1%}", f"{ms['prefill']:.0f}"]
        cells += [f"{row['first_token_ms']:.0f}", f"{ms['decode']:.0f}"]
        gflops = (cost["vision"] + cost["projector"], cost["prefill"], cost["decode"])
        cells += [f"{flops / 1e9:.{1 if flops < 1e11 else 0}f}" for flops in gflops]
        cells += [f"{row['kv_bytes'] / 2**20:.2f}", f"{cost['kv_bytes'] / 2**20:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(rows: list[Row]) -> list[str]:
    """Describe what is not a plain measurement, for each model."""
    lines = [f"float32, random weights, {TEXT_TOKENS} text tokens, {NEW_TOKENS} new tokens, one image"]
    for row in {row["model"]: row for row in rows}.values():
        run, every, crops = row["layers_run"], row["layers"], row["crops"]
        line = f"{row['model']}: {crops} crop{'s' * (crops > 1)} through the tower, median of {row['repeats']}; "
        if run == every:
            lines.append(line + f"all {every} decoder layers were run")
        else:
            scaled = f"time in layers and KV bytes EXTRAPOLATED to {every} (x {every / run:.2f})"
            lines.append(line + f"{run} of {every} decoder layers were run, {scaled}")
    return lines


def verdicts(rows: list[Row], shapes: list[Shape]) -> list[str]:
    """Compare the results with the targets."""
    found = {(row["model"], row["tokens"]): row for row in rows}
    lines = []
    for shape in shapes:
        most, least = found[shape.name, shape.budgets[0]], found[shape.name, shape.budgets[-1]]
        ratio = most["ms"]["prefill"] / least["ms"]["prefill"]
        counted = most["cost"]["prefill"] / least["cost"]["prefill"]
        line = f"{shape.name}: prefill at {least['tokens']} tokens {ratio:.1f} x faster than at {most['tokens']}"
        line += f" (FLOPs: {counted:.1f} x fewer)"
        if shape is SHAPES["llava"]:
            line += f", at least {PREFILL_TARGET:.0f}: {'reached' if ratio >= PREFILL_TARGET else 'MISSED'}"
        lines.append(line)
        for keep, limit in shape.shares.items():
            share = 100 * found[shape.name, keep]["share_of_tower"]
            verdict = "reached" if share < limit else "MISSED"
            lines.append(
                f"{shape.name}: scoring and selection at k = {keep}: {share:.1f} % of the tower, "
                f"below {limit:.0f} %: {verdict}"
            )
    wrong = [row for row in rows if row["kv_bytes"] != row["cost"]["kv_bytes"]]
    lines.append(f"KV-cache bytes as counted in {len(rows) - len(wrong)} of {len(rows)} rows")
    return lines


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    fig, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 4.4), layout="constrained", squeeze=False)
    colors = dict(zip(("vision", "scoring", "selection", "prefill"), palette.SERIES, strict=False))
    for axis, model in zip(axes[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        labels = [f"{row['tokens']}\n{row['method']}" for row in mine]
        bottom = [0.0] * len(mine)
        for part in PARTS:
            heights = [row["ms"][part] / 1e3 for row in mine]
            axis.bar(labels, heights, bottom=bottom, color=colors[part], label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for i, top in enumerate(bottom):
            axis.annotate(f"{top:.1f} s", (i, top), ha="center", va="bottom", fontsize=9)
        run, every = mine[0]["layers_run"], mine[0]["layers"]
        note = f"\n(extrapolated from {run} of {every} layers)" if run != every else ""
        axis.set(title=model + note, xlabel="visual tokens kept", ylabel="seconds to the first token")
        axis.margins(y=0.1)
        axis.grid(axis="y", alpha=0.3)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="default: both")
    parser.add_argument("--quick", action="store_true", help="one repetition, at most 2 decoder layers of the 7B")
    parser.add_argument("--gib", type=float, default=12.0, help="memory for the weights of a model (default: 12)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument("--attention", type=int, metavar="N", help="compare plain and proportional attention")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    if options.attention:
        print(compare_attention(options.attention))
        return
    load = round(os.getloadavg()[0], 1)
    shapes = [SHAPES[name] for name in dict.fromkeys(options.models)]
    repeats = [1 if options.quick else shape.repeats for shape in shapes]
    depths = [layers_that_fit(shape, options.gib) for shape in shapes]
    if 0 in depths:
        parser.error(f"--gib {options.gib}: not even one decoder layer of {shapes[depths.index(0)].name} fits")
    if options.quick:
        depths = [min(n, 2) if shape is SHAPES["llava"] else n for n, shape in zip(depths, shapes, strict=True)]
    steps = sum(2 + n * len(shape.budgets) for n, shape in zip(repeats, shapes, strict=True))
    rows: list[Row] = []
    with tqdm(total=steps, desc="end to end", unit="call", disable=None) as bar:
        for shape, layers, n in zip(shapes, depths, repeats, strict=True):
            rows += measure(shape, layers, n, bar)
            gc.collect()

    options.out.mkdir(parents=True, exist_ok=True)
    machine: Row = {"machine": platform.machine(), "kernels": torch.backends.cpu.get_cpu_capability()}
    machine |= {"threads": options.threads, "torch": torch.__version__, "load before": load}
    (options.out / "end_to_end.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    head = ", ".join(f"{k} {v}" for k, v in machine.items())
    text = "\n".join([head, *notes(rows), "", table(rows), "", *verdicts(rows, shapes)])
    (options.out / "end_to_end.md").write_text(text + "\n")
    plot(rows, options.out / "end_to_end.png")
    print(text)
    print(f"\nwritten: {options.out}/end_to_end.json, end_to_end.md, end_to_end.png")


if __name__ == "__main__":
    main()
