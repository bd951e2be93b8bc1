"""`clustrs bench`: counts against arithmetic by hand, extrapolation against the whole model, shapes, bad input."""

import csv
import gc
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from tiny_models import make_image

from clustrs import ClusterMeans, FastV, PruningConfig
from clustrs.embedded import model_folder
from clustrs.evaluation import bench
from clustrs.evaluation.bench import STAGES, TIMES, BenchResult, PeakBytes, Trace, bench_model
from clustrs.models import shapes
from clustrs.models.ask import chat_prompt
from clustrs.models.configuration import from_config
from clustrs.models.load import load_config, load_processor
from clustrs.validation import LoadOptions
from tools import speed

LoadFamily = Callable[[str], tuple[Any, Any]]
Run = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
TINY = ("bench", "--model", "mini-llava", "--layers", 1, "--new-tokens", 2, "--repeats", 1)


def measure(model: Any, processor: Any, keep: int = 5, **options: Any) -> BenchResult:
    given = {"name": "tiny", "new_tokens": 3, "repeats": 2, **options}
    return bench_model(
        model, processor, make_image(), "what?", [PruningConfig(method=ClusterMeans(keep=keep))], **given
    )


def test_counts_are_those_of_arithmetic(load_family: LoadFamily) -> None:
    """LLaVA with 16 patches of 7 pixels; a language model of 2 layers, width 32, 4 heads of 8, 2 of them with keys."""
    model, processor = load_family("llava")
    result = measure(model, processor, batches=(1, 2))
    text, vocabulary = result.text_tokens, model.config.text_config.vocab_size
    assert [(row.batch, row.keep, row.visual_tokens) for row in result.rows] == [
        *((1, None, 16), (1, 5, 5), (2, None, 16), (2, 5, 5))
    ]
    for row in result.rows:
        assert list(row.flops) == ["vision", "projector", "prefill", "decode"]
        tokens = text + row.visual_tokens
        assert row.kv_bytes == row.batch * 2 * tokens * 2 * (2 * 8) * 4  # layers, tokens, keys and values, width, bytes
        projections = 2 * tokens * 32 * (32 + 16 + 16 + 32 + 3 * 64)
        attention = 2 * 2 * tokens * tokens * 32
        assert row.flops["prefill"] == row.batch * (2 * (projections + attention) + 2 * 32 * vocabulary)
        tower = 3 * (2 * 17 * 32 * (4 * 32 + 2 * 64) + 2 * 2 * 17 * 17 * 32) + 2 * 16 * 32 * 3 * 7 * 7
        assert row.flops["vision"] == row.batch * tower
        weights = sum(p.nbytes for p in model.parameters())
        assert row.peak_bytes > weights + row.kv_bytes
    assert result.rows[0].peak_bytes > result.rows[1].peak_bytes


@pytest.mark.parametrize(
    "family", ["llava_onevision", "qwen3_vl", "qwen2_5_vl", "internvl", "smolvlm", "gemma3", "gemma4"]
)
def test_every_family_is_measured(load_family: LoadFamily, family: str) -> None:
    model, processor = load_family(family)
    result = measure(model, processor, repeats=1, new_tokens=2)
    whole, pruned = result.rows
    assert pruned.visual_tokens == 5 < whole.visual_tokens
    assert pruned.flops["vision"] == whole.flops["vision"] > 0
    assert pruned.flops["prefill"] < whole.flops["prefill"]
    assert pruned.kv_bytes < whole.kv_bytes


def test_stages_add_up(load_family: LoadFamily) -> None:
    result = measure(*load_family("llava"), repeats=3)
    for row in result.rows:
        assert {part: len(taken) for part, taken in row.seconds.items()} == dict.fromkeys(TIMES, 3)
        for turn in range(3):
            spent = {part: taken[turn] for part, taken in row.seconds.items()}
            assert sum(spent[part] for part in STAGES) == pytest.approx(spent["first token"])
            assert all(spent[part] >= 0 for part in TIMES)
            assert spent["first token"] + 2 * spent["decode per token"] <= spent["end to end"]
            assert (spent["selection"] > 0) == (row.keep is not None)
    assert result.speedups(result.rows[0], "end to end") == [1, 1, 1]


def test_model_is_as_before(load_family: LoadFamily) -> None:
    model, processor = load_family("llava")
    before = dict(model.model.__dict__), len(model.model._forward_hooks)
    measure(model, processor)
    assert (dict(model.model.__dict__), len(model.model._forward_hooks)) == before
    assert not model.get_decoder()._forward_hooks


def deeper(config: Any) -> Any:
    """The config with 6 layers; where there are two kinds, four of one and two of the other."""
    text = config.get_text_config()
    text.num_hidden_layers = 6
    if len(set(getattr(text, "layer_types", None) or ())) > 1:
        text.layer_types = 2 * ["sliding_attention", "sliding_attention", "full_attention"]
    elif getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * 6
    return config


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Tensors in reference cycles are held until the collector runs, at a time of its own."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("family", "layers"), [("llava", 1), ("llava_onevision", 4), ("gemma3", 2), ("qwen3_vl", 3)])
def test_extrapolated_counts_are_those_of_the_whole_model(load_family: LoadFamily, family: str, layers: int) -> None:
    model, processor = load_family(family)
    config = deeper(model.config)
    whole = measure(shapes.random_model(config, torch.float32, CPU), processor, repeats=1)
    cut, scales = shapes.cut_layers(config, layers)
    assert (len(scales), sum(scales)) == (layers, 6)
    part = measure(shapes.random_model(cut, torch.float32, CPU), processor, repeats=1, whole=config, scales=scales)
    assert (part.layers_run, part.layers, whole.layers_run) == (layers, 6, 6)
    for one, other in zip(part.rows, whole.rows, strict=True):
        assert (one.flops, one.kv_bytes, one.visual_tokens) == (other.flops, other.kv_bytes, other.visual_tokens)
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.05)
    assert "EXTRAPOLATED from" in part.heading()
    assert "extrapolated" in part.sentence()
    named = {name for name in part.quantities(part.rows[0]) if name.endswith(", extrapolated")}
    assert len(named) == 4 + 2 + 2  # times with layers in them, ratios, bytes
    assert "xtrapolated" not in (whole.heading() + whole.sentence() + str(whole.tables())).replace("EXTRA", "extra")


def test_each_layer_counts_for_those_of_its_kind() -> None:
    """Two tokens; layers of 1 and 2 s in the prefill, 0.1 and 0.2 s in the next step, for 4 and 2 layers."""
    trace = Trace([4.0, 2.0])
    enter, leave = [1.0, 2.0, 5.0, 5.1], [2.0, 4.0, 5.1, 5.3]
    events = {"vision": [0.25], "features": [0.75], "prompt": [1.0, 5.0], "logits": [4.5, 5.5]}
    trace.times.update(events | {"enter": enter, "leave": leave})
    assert trace.seconds(0.0, 6.0, None) == pytest.approx(
        {
            **{"vision": 0.5, "scoring": 0, "selection": 0, "prefill": 3.5 + 3 + 2, "other": 0.5},
            **{"first token": 4.5 + 3 + 2, "decode per token": 1.0 + 0.3 + 0.2, "end to end": 6 + 5 + 0.5},
        }
    )


def test_layers_inside_which_a_method_prunes_are_not_cut(load_family: LoadFamily) -> None:
    model, processor = load_family("llava")
    configs = [PruningConfig(method=FastV(keep=4, layer=1))]
    whole, pruned = bench_model(model, processor, make_image(), "what?", configs, name="tiny", new_tokens=2).rows
    assert pruned.kv_bytes < whole.kv_bytes
    with pytest.raises(ValueError, match="layers must be all for a method inside the language model"):
        bench_model(model, processor, make_image(), "what?", configs, name="tiny", scales=[3.0, 3.0])


@torch.inference_mode()
def test_peak_memory_counts_what_is_held_at_once() -> None:
    weight = torch.ones(1000)
    with PeakBytes() as memory:
        first = torch.zeros(100)
        view = first[10:]
        del first
        assert memory.now == 400
        second = view + 1  # 90 more
        weight[:3].add_(1)
        del view
        assert (memory.now, memory.peak) == (360, 760)
        del second
    assert (memory.now, memory.peak) == (0, 760)


PARAMETERS = {
    "llava-1.5-7b": 7_063_427_072,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "gemma-3-4b": 4_300_079_472,
    "smolvlm-256m": 256_484_928,
}
ROUNDED = {
    "llava-1.5-13b": 13.4e9,
    "llava-onevision-0.5b": 0.894e9,
    "llava-onevision-7b": 8.03e9,
    "internvl3-2b": 2.09e9,
}
VISUAL = [576, 576, 2929, 2929, 391, 391, 300, 300, 3328, 256, 832]


def test_shapes_have_as_many_parameters_as_the_published_models() -> None:
    """Exactly, or to three digits where only those are known."""
    counted = {name: shapes.weight_bytes(shapes.shape_config(name), torch.float16)[0] // 2 for name in shapes.shapes()}
    assert {name: counted[name] for name in PARAMETERS} == PARAMETERS
    assert {name: float(f"{counted[name]:.3g}") for name in ROUNDED} == ROUNDED
    assert set(counted) == {*PARAMETERS, *ROUNDED}


def test_shapes_read_a_photograph_of_640_x_480_as_published() -> None:
    found, image = [], Image.new("RGB", (640, 480))
    for name in shapes.shapes():
        processor, config = shapes.shape_processor(name), shapes.shape_config(name)
        inputs = processor(images=[[image]], text=[chat_prompt(processor, "word " * 38)], return_tensors="pt")
        found.append(int((inputs["input_ids"] == config.image_token_id).sum()))
        assert int((inputs["input_ids"] == 5).sum()) == 38
    assert found == VISUAL


def test_help_names_every_shape(run: Run) -> None:
    text = run("bench", "--help")[1]
    assert all(f" {name}" in text.replace("\n", " ") for name in shapes.shapes())


def test_command_prints_and_writes_what_it_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0, 0))
    code, out, err = run(*TINY, "--keep", 16, 0.25, "-o", tmp_path)
    assert code == 0
    assert "the machine is busy (load average 99.0)" in err
    assert "mini-llava (random weights): EXTRAPOLATED from 1 of 6 layers of the language model; CPU" in out
    assert "can make it at most" in out
    result = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=BenchResult)
    assert [row.visual_tokens for row in result.rows] == [576, 16, 144]
    assert json.loads(result.to_json()) == json.loads((tmp_path / "bench.json").read_text())
    assert result.heading() in out
    assert result.sentence() in out
    lines = list(csv.reader((tmp_path / "bench.csv").open()))
    assert [line[2] for line in lines] == ["keep", "all", "16", "0.25"]
    assert float(lines[2][lines[0].index("KV cache, MiB, extrapolated")]) == result.rows[1].kv_bytes / 2**20
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_command_takes_a_pruning_configuration_and_prints_json(run: Run, tmp_path: Path) -> None:
    PruningConfig(method=ClusterMeans(keep=9), positions="compact").save_pretrained(tmp_path)
    code, out, _ = run(*TINY, "--pruning", tmp_path, "--json")
    result = msgspec.json.decode(out, type=BenchResult)
    assert code == 0
    assert [row.keep for row in result.rows] == [None, 9]
    assert from_config(result.pruning) == from_config(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "llava-1.5-8b"), "shape must be one of .*did you mean 'llava-1.5-7b'"),
        (("--shape", "llava-1.5-7b", "--model", "mini-llava"), "--model and --shape exclude each other"),
        (("--model", "no/such/folder"), "model 'no/such/folder': there is no such folder"),
        (("--model", "nobody/nothing"), "model 'nobody/nothing' could not be loaded"),
        (("--layers", "0"), "--layers must be an integer from 1 to"),
        (("--model", "mini-llava", "--layers", "7"), "layers must be an integer from 1 to 6 for this model, got 7"),
        (("--shape", "gemma-3-4b", "--layers", "1"), "layers must be an integer from 2 to 34 for this model, got 1"),
        ((*TINY[1:], "--keep", "576"), "keep must be below the image's 576 visual tokens, got 576"),
        (("--keep", "0"), "--keep must be a count"),
        (("--method", "none"), "keep must be 1.0 or left out .this method keeps every token"),
        (("--size", "640"), "--size must be WIDTHxHEIGHT in pixels"),
        (("--batch", "0"), "--batch must be an integer from 1"),
        (("--new-tokens", "1"), "--new-tokens must be an integer from 2"),
        (("--image", "nothing.jpg"), "nothing.jpg"),
        (("--shape", "smolvlm-256m", "--pruning", "none.json"), "No such file"),
        (("--pruning", "pruning.json", "--keep", "4"), "--pruning and --keep exclude each other"),
    ],
)
def test_bad_input_is_refused_in_one_line(run: Run, words: tuple[Any, ...], message: str) -> None:
    code, out, err = run("bench", *words)
    lines = [line for line in err.splitlines() if "the machine is busy" not in line]
    assert (code, out, len(lines)) == (2, "", 1)
    assert re.search(message, lines[0]), lines


def test_layers_that_fit_are_built_or_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(model_folder("mini-llava"))
    whole, layer = shapes.weight_bytes(load_config(folder), torch.float32)
    opened, *_, scales = shapes.open_model(folder, False, 4, LoadOptions())
    assert (opened.config.get_text_config()._attn_implementation, scales) == ("sdpa", [1.5] * 4)
    free = int((whole - 2.5 * layer) / shapes.FILLED)
    monkeypatch.setattr(shapes, "free_bytes", lambda device: free)
    code, _, err = run("bench", "--model", folder)
    assert code == 2
    assert "with 6 of 6 layers does not fit" in err
    assert "write --layers 3" in err
    monkeypatch.setattr(shapes, "free_bytes", lambda device: layer)
    assert "no layers fit" in run("bench", "--model", folder, "--layers", 1)[2]
    config = load_config(folder)
    monkeypatch.setattr(shapes, "shape_config", lambda name: config)
    monkeypatch.setattr(shapes, "shape_processor", lambda name: load_processor(folder))
    monkeypatch.setattr(shapes, "free_bytes", lambda device: free)
    code, out, err = run("bench", "--shape", "mine", "--keep", 8, "--new-tokens", 2, "--repeats", 1)
    assert code == 0
    assert "3 of 6 layers fit into the free memory; the rest is extrapolated" in err
    assert "EXTRAPOLATED from 3 of 6" in out


def test_gpu_is_named_and_busy_machines_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = type("Model", (), {"device": torch.device("cuda"), "dtype": torch.float16})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    assert bench.describe_machine(model) == "NVIDIA X, float16"
    for load, busy in ((0.1, False), (50.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        assert bench.busy_load() == (load, busy)


def test_pages_show_the_stored_runs() -> None:
    for page, make in speed.PAGES.items():
        assert speed.with_runs(page.read_text(), make()) == page.read_text()
