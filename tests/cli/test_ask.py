"""The command line: what it prints, what it draws, and one clear line for every mistake."""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image, ImageSequence

import clustrs
from clustrs.cli import ask as cli_ask
from clustrs.cli import base, main
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.embedded import DEFAULT, EMBEDDED
from clustrs.models import draw
from clustrs.models.adapters.base import adapter_class, list_model_types
from clustrs.models.ask import as_seen, chat_prompt
from clustrs.models.ask import ask as ask_model
from clustrs.models.load import load_model

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    tiny_models.build("llava", "clip", folder)
    return folder


@pytest.fixture(scope="session")
def anyres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava_next")
    tiny_models.build("llava_next", "clip", folder)
    return folder


@pytest.fixture(scope="session")
def image_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    tiny_models.make_image(40, 60).save(path)
    return path


@pytest.fixture
def ask(run: Run, folder: Path, image_file: Path) -> Callable[..., dict[str, Any]]:
    def ask(*words: Any) -> dict[str, Any]:
        common = ("--model", folder, "--max-new-tokens", 4, "--json")
        code, out, err = run("ask", image_file, "What is this?", *common, *words)
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert isinstance(result, dict)
        return result

    return ask


def test_ask_prints(run: Run, folder: Path, image_file: Path) -> None:
    options = ("--keep", 5, "--max-new-tokens", 3)
    code, out, err = run("ask", image_file, "What is this?", "--model", folder, *options)
    assert (code, err) == (0, "")
    assert "clustrs: kept 5 of 16 visual tokens; generated 3" in out
    last = out.splitlines()[-1]
    assert last.startswith("milliseconds: vision ")
    assert all(part in last for part in ("scoring", "selection", "prefill", "decode", "per token"))


def test_ask_json(ask: Callable[..., dict[str, Any]], folder: Path, image_file: Path) -> None:
    result = ask("--keep", 5)
    assert result["method"] == clustrs.ClustRS(keep=5).to_dict() | {"clip": [0.1, 0.95]}
    assert (result["unpruned_tokens"], result["visual_tokens"], result["new_tokens"]) == (16, 5, 4)
    assert len(set(result["kept"])) == 5
    assert result["image"] == str(image_file)
    assert result["corruption"] is None
    assert result["expected"] is None
    seconds = result["seconds"]
    assert set(seconds) == {"vision", "scoring", "selection", "prefill", "decode", "decode_per_token"}
    assert all(value > 0 for value in seconds.values())
    assert seconds["decode"] == pytest.approx(3 * seconds["decode_per_token"])


def sample_questions(*texts: str) -> list[list[str]]:
    """The images and questions of commands about sample images."""
    found = re.findall(r"^  clustrs (?:ask|compare) (sample:.*?\".*?\")", "\n".join(texts), re.M)
    return [shlex.split(words) for words in dict.fromkeys(found)]


@pytest.mark.parametrize("method", ["none", "clustrs"])
def test_the_examples_of_the_help_are_answered_rightly(run: Run, method: str) -> None:
    examples = sample_questions(base.EXAMPLES, cli_ask.ASK_EXAMPLES, cli_ask.COMPARE_EXAMPLES)
    assert examples
    for image, question in examples:
        code, out, _ = run("ask", image, question, "--method", method, "--json")
        assert code == 0
        result = json.loads(out)
        assert result["answer"] == result["expected"]


def test_the_expected_answer_is_printed(run: Run) -> None:
    words = ("sample:photo-3", "What is at the top right?", "--model", "mini-llava")
    assert run("ask", *words)[1].splitlines()[1] == "expected: guitar (wrong)"
    assert "expected: guitar\n" in run("compare", *words, "--methods", "clustrs")[1]
    assert "expected" not in run("ask", "sample:photo-3", "Why?", "--model", "mini-llava")[1]


def test_one_new_token_has_no_decode(
    ask: Callable[..., dict[str, Any]], run: Run, folder: Path, image_file: Path
) -> None:
    seconds = ask("--max-new-tokens", 1)["seconds"]
    assert seconds["decode"] == 0
    assert seconds["decode_per_token"] is None
    assert "decode - per token" in run("ask", image_file, "Hm?", "--model", folder, "--max-new-tokens", 1)[1]


def test_unpruned_answer_is_the_models_own(ask: Callable[..., dict[str, Any]], folder: Path, image_file: Path) -> None:
    model, processor = load_model(str(folder))
    text = chat_prompt(processor, "What is this?")
    inputs = processor(images=[open_image(image_file)], text=[text], return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    expected = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert ask("--method", "none")["answer"] == expected
    assert ask("--keep", "1.0")["answer"] == expected
    assert ask("--keep", 16)["answer"] == expected


@pytest.mark.parametrize(("keep", "count"), [("4", 4), ("0.25", 4), ("1.0", 16), ("1", 1), ("99", 16)])
def test_keep(ask: Callable[..., dict[str, Any]], keep: str, count: int) -> None:
    assert ask("--keep", keep)["visual_tokens"] == count


def test_settings(ask: Callable[..., dict[str, Any]]) -> None:
    method = ask("--set", "tau=2", "--set", "shrink=false", "--set", "distance=euclidean", "--set", "clip=[0.2,0.9]")
    expected = {"tau": 2, "shrink": False, "distance": "euclidean", "clip": [0.2, 0.9], "keep": 16}
    assert expected.items() <= method["method"].items()


def test_corruption_reaches_the_model(ask: Callable[..., dict[str, Any]]) -> None:
    clean, corrupted, again = ask("--keep", 5), *(ask("--keep", 5, "--corrupt", "gaussian:3") for _ in range(2))
    assert corrupted["corruption"] == {"name": "gaussian", "level": 3.0, "seed": 0}
    assert (corrupted["kept"], corrupted["answer"]) == (again["kept"], again["answer"])
    assert (corrupted["kept"], corrupted["answer"]) != (clean["kept"], clean["answer"])
    assert ask("--corrupt", "gaussian:3", "--seed", 8)["corruption"]["seed"] == 8


def test_corruption_is_named_by_the_file(
    monkeypatch: pytest.MonkeyPatch, run: Run, folder: Path, image_file: Path
) -> None:
    calls = []

    def apply(self: Corruption, image: Image.Image, image_id: str, seed: int = 0) -> Image.Image:
        calls.append((str(self), image_id, seed))
        return image

    monkeypatch.setattr(Corruption, "apply", apply)
    options = ("--model", folder, "--max-new-tokens", 1, "--corrupt", "jpeg:30", "--seed", 3)
    assert run("ask", image_file, "Hm?", *options)[0] == 0
    assert calls == [("jpeg:30", "noise.png", 3)]


def test_options_reach_the_model(run: Run, anyres: Path, image_file: Path) -> None:
    def tokens(*words: Any) -> tuple[int, int]:
        common = ("--model", anyres, "--keep", 3, "--max-new-tokens", 2, "--json")
        code, out, err = run("ask", image_file, "What?", *common, *words)
        assert (code, err) == (0, "")
        result = json.loads(out)
        return result["visual_tokens"], result["unpruned_tokens"]

    kept, unpruned = tokens()
    assert (kept, unpruned > 2 * 16) == (3, True)
    assert tokens("--scope", "crop") > (3, unpruned)
    assert tokens("--crops", "base", "--keep", "1.0") == (16, unpruned)
    assert tokens("--positions", "original") == (3, unpruned)


def test_compare(run: Run, folder: Path, image_file: Path, tmp_path: Path) -> None:
    show = tmp_path / "new" / "kept.png"
    options = ("--keep", 4, "--max-new-tokens", 3, "--show", show)
    code, out, err = run("compare", image_file, "What is this?", "--model", folder, *options)
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert last == f"drawing: {show}"
    assert all(
        part in lines[0]
        for part in ("method", "tokens", "prefill ms", "decode/token ms", "total ms", "x faster", "answer")
    )
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert sorted(names) == clustrs.list_methods("encoder")
    assert names[0] == "none"
    counts = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines[2:]}
    assert counts == {name: "16/16" if name == "none" else "4/16" for name in names}
    assert Image.open(show).width > 1000


def test_compare_some_as_json(run: Run, folder: Path, image_file: Path) -> None:
    common = ("--model", folder, "--max-new-tokens", 2, "--json")
    settings = ("--methods", "none, random,clustrs", "--set", "seed=5", "--set", "tau=2", "--keep", "0.5")
    code, out, err = run("compare", image_file, "What?", *common, *settings)
    assert (code, err) == (0, "")
    methods = [result["method"] for result in json.loads(out)["results"]]
    assert [method["name"] for method in methods] == ["none", "random", "clustrs"]
    assert methods[1] == {"name": "random", "keep": 0.5, "seed": 5}
    assert (methods[2]["seed"], methods[2]["tau"]) == (5, 2)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("method", ["clustrs", "visionzip", "fastervlm", "none"])
def test_show(run: Run, anyres: Path, image_file: Path, tmp_path: Path, method: str, suffix: str) -> None:
    show = tmp_path / f"kept.{suffix}"
    options = ("--model", anyres, "--method", method, "--max-new-tokens", 1, "--show", show)
    code, out, err = run("ask", image_file, "What costs $5 or $6?", *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"drawing: {show}"
    if suffix == "png":
        assert len(np.unique(np.asarray(Image.open(show).convert("RGB")).reshape(-1, 3), axis=0)) > 50
    else:
        assert show.read_text().startswith("<?xml")


def test_drawing_that_cannot_be_stored(run: Run, folder: Path, image_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    show = tmp_path / "file" / "kept.png"
    code, _, err = run("ask", image_file, "What?", "--model", folder, "--max-new-tokens", 1, "--show", show)
    assert code == 2
    assert err.startswith(
        f"clustrs: --show must be a folder that can be written to, got '{show.parent}' ('{show.parent}' is not"
    )


def test_onevision(run: Run, image_file: Path, tmp_path: Path) -> None:
    tiny_models.build("llava_onevision", "siglip", tmp_path)
    options = ("--model", tmp_path, "--max-new-tokens", 2, "--keep", 3, "--json", "--show", tmp_path / "kept.png")
    for command in ("ask", "compare"):
        code, out, err = run(command, image_file, "What?", *options)
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert result.get("results", [result])[-1]["visual_tokens"] == 3
        assert result["drawing"] == str(tmp_path / "kept.png")


def test_methods(run: Run) -> None:
    code, out, err = run("methods")
    assert (code, err) == (0, "")
    assert all(name in out for name in clustrs.list_methods())
    code, out, err = run("methods", "clustrs")
    assert (code, err) == (0, "")
    assert "  tau=1.0\n" in out
    assert "also in    ONNX, vLLM\n" in out
    assert "https://arxiv.org/abs/2412.01818" in run("methods", "fastervlm")[1]
    assert run("methods", "clustr")[0] == 2
    listed = {method["name"]: method for method in json.loads(run("methods", "--json")[1])}
    assert sorted(listed) == clustrs.list_methods()
    assert listed["vispruner"]["parameters"] == {"keep": "required", "important": 0.5}
    assert listed["none"]["parameters"] == {"keep": 1.0}


def test_models(run: Run) -> None:
    code, out, err = run("models")
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.split("\n\n")[0].splitlines()]
    assert cells[0] == ["family", "vLLM", "ONNX", "in-LLM methods", "video"]
    lines = {row[0]: row[1:] for row in cells[2:]}
    assert sorted(lines) == list_model_types()
    assert lines["llava_next"] == ["backend", "yes", "yes", "no"]
    assert max(map(len, out.splitlines())) <= 110
    assert "not on published checkpoints" in out
    listed = {family["model_type"]: family for family in json.loads(run("models", "--json")[1])}
    assert sorted(listed) == list_model_types()
    assert listed["qwen2_5_vl"]["tokens_per_image"] == "one per 28 x 28 pixels"
    assert listed["internvl"]["class"] == "InternVLForConditionalGeneration"
    for model in EMBEDDED:
        assert model.name in out
        assert asdict(model) in listed[model.family]["embedded"]
    assert listed["internvl"]["embedded"] == []
    assert out.endswith(f"The default is {DEFAULT}\n")
    for model_type, family in listed.items():
        if adapter_class(model_type).__module__.startswith("clustrs."):
            assert family["tested"] != "not stated", f"{model_type}: the adapter must say what was tested"
            assert family["tokens_per_image"] != "not stated", f"{model_type}: the adapter must say how many there are"


def test_methods_needs_no_models() -> None:
    code = (
        "import sys; from clustrs.cli import main; main(['methods']); "
        "print({'transformers', 'matplotlib', 'PIL', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_panels_of_a_drawing_have_names_as_papers_write_them(
    run: Run, image_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("clustrs.models.draw.draw_comparison", lambda _, kept, *__: drawn.extend(kept))
    words = ("--methods", "clustermeans", "clustrs", "--max-new-tokens", 1, "--show", tmp_path / "kept.png")
    assert run("compare", image_file, "What is it?", "--model", "mini-llava", *words)[0] == 0
    assert [name.partition(":")[0] for name in drawn] == ["ClusterMeans", "ClustRS"]


def test_examples_in_the_help_fit_80_columns() -> None:
    for module in base.MODULES:
        import_module(f"clustrs.cli.{module}")
    texts = [base.EXAMPLES, *(one.epilog for one in base.app.registered_commands)]
    lines = [line for text in texts if text for line in text.splitlines()]
    assert len(lines) > 40
    assert [line for line in lines if len(line) > 80] == []


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in [
        (["--version"], f"clustrs {clustrs.__version__}\n"),
        (["--help"], "start here:"),
        (["ask", "--help"], "--corrupt gaussian:0.5 --show kept.png"),
        (["compare", "--help"], "--keep 16 64 --show kept.png"),
    ]:
        assert main(words) == 0
        assert expected in capsys.readouterr().out


def bad_images(folder: Path) -> dict[str, Path]:
    """Files that are no images, by what is said of them."""
    buffer = io.BytesIO()
    tiny_models.make_image(200, 200).save(buffer, "PNG")
    files = {"text.png": b"hello", "empty.png": b"", "cut.png": buffer.getvalue()[:2000]}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    Image.new("F", (4, 4)).save(folder / "float.tiff")
    return {
        "not an image in any format": folder / "text.png",
        "not an image in any": folder / "empty.png",
        "could not be read: ": folder / "cut.png",
        "32-bit pixels": folder / "float.tiff",
        "there is no such file": folder / "missing.png",
        "not a file": folder,
    }


@pytest.mark.parametrize("command", ["ask", "compare"])
def test_bad_images(run: Run, folder: Path, tmp_path: Path, command: str) -> None:
    for message, path in bad_images(tmp_path).items():
        code, out, err = run(command, path, "What?", "--model", folder)
        assert (code, out) == (2, "")
        assert err.startswith("clustrs: image ")
        assert err.count("\n") == 1
        assert message in err


def test_decompression_bomb(monkeypatch: pytest.MonkeyPatch, image_file: Path) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="too large, more than 200 pixels"):
        open_image(image_file)


def test_images_of_all_kinds(tmp_path: Path) -> None:
    deep = np.array([[0, 0x80FF], [0x4000, 0xFFFF]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    opened = open_image(tmp_path / "deep.png")
    assert np.asarray(opened)[..., 0].tolist() == [[0, 0x80], [0x40, 0xFF]]
    for mode in ("L", "P", "RGBA", "1", "CMYK"):
        path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
        tiny_models.make_image(4, 6).convert(mode).save(path)
        opened = open_image(path)
        assert (opened.mode, opened.size) == ("RGB", (6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    tiny_models.make_image(4, 6).save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (4, 6)


def test_one_colour_and_tiny_images(run: Run, folder: Path, anyres: Path, tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "black.png")
    for model in (folder, anyres):
        options = ("--model", model, "--max-new-tokens", 1, "--keep", 3, "--show", tmp_path / "kept.png")
        assert run("ask", tmp_path / "black.png", "What?", *options)[0] == 0


MISTAKES: list[tuple[list[str], str]] = [
    (
        ["--method", "clusters"],
        "unknown method 'clusters' (did you mean 'clustrs'?), expected one of cdpruner, ",
    ),
    (["--keep", "many"], "--keep must be a count (16) or a fraction (0.25), got 'many'"),
    (["--keep", "0"], "--keep must be a count"),
    (["--keep", "1.5"], "--keep must be a count"),
    (["--keep", "nan"], "--keep must be a count"),
    (["--method", "none", "--keep", "16"], "keep must be 1.0 or left out (this method keeps every token), got 16"),
    (["--set", "tau"], "--set must be KEY=VALUE (write tau=2), got 'tau'"),
    (["--set", "=2"], "--set must be KEY=VALUE"),
    (["--set", "tua=2"], "clustrs has no parameter 'tua' (did you mean 'tau'?)"),
    (["--set", "tau=-1"], "tau must be a number above 0, got -1"),
    (["--set", "tau=big"], "tau must be a number above 0, got 'big'"),
    (["--set", "keep=3"], "--set must not contain keep (write --keep 3)"),
    (["--corrupt", "sleet:1"], "unknown corruption 'sleet'; available: gaussian, salt_pepper"),
    (["--corrupt", "fog:1"], "unknown corruption 'fog' (did you mean 'imagenet_c/fog'?); available: gaussian"),
    (["--corrupt", "gaussian"], "corruption must be NAME:LEVEL"),
    (["--seed", "x"], "--seed must be an integer from 0 to 9223372036854775807, got 'x'"),
    (["--scope", "all"], "--scope must be one of image, crop, video, frame, got 'all'"),
    (["--crops", "first"], "--crops must be one of all, base, got 'first'"),
    (["--positions", "none"], "--positions must be one of auto, compact, original, got 'none'"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be an integer from 1 to 2147483647"),
    (["--show", "kept.xyz"], "drawing must be a file name that ends in .png, .pdf, .svg, got 'kept.xyz'"),
    (["--nonsense"], "no such option: --nonsense (see clustrs ask --help)"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_mistakes(run: Run, folder: Path, image_file: Path, words: list[str], message: str) -> None:
    code, out, err = run("ask", image_file, "What?", "--model", folder, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"clustrs: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "clustrs,nothing"], "unknown method 'nothing'"),
        (["--methods", "clustrs,"], "--methods must be values separated by spaces or commas, none of them empty"),
        (["--methods", "grid,grid"], "--methods has a duplicate value: grid"),
        (["--set", "tua=2"], "--set tua is not a parameter of any of these methods"),
        (["--methods", "grid", "--set", "tau=2"], "--set tau is not a parameter of any of these methods"),
    ],
)
def test_mistakes_in_compare(run: Run, folder: Path, image_file: Path, words: list[str], message: str) -> None:
    code, out, err = run("compare", image_file, "What?", "--model", folder, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"clustrs: {message}")
    assert err.count("\n") == 1


def test_mistakes_in_words(run: Run, folder: Path, image_file: Path) -> None:
    mistakes: list[tuple[list[Any], str]] = [
        (["shrink"], "no such command 'shrink' (see clustrs --help)"),
        (["aks"], "no such command 'aks' (did you mean "),
        (["ask"], "missing argument 'IMAGE' (see clustrs ask --help)"),
        (["ask", "sample:scene-1"], "missing argument 'QUESTION' (see clustrs ask --help)"),
        (["ask", "sample:scene-1", "What?", "--kep", "3"], "no such option: --kep (did you mean '--keep'?)"),
        (["ask", "sample:scene-1", "What?", "--model", "--json"], "--model needs a value"),
        (["ask", "sample:scene-1", "What?", "more"], "got unexpected extra argument(s) (more)"),
        (["study", "stabilty"], "no such command 'stabilty' (did you mean 'stability'?)"),
        (["ask", "sample:dog", "What?"], "image 'sample:dog': the samples are photo-1"),
        (["ask", image_file, " ", "--model", folder], "question must not be empty"),
        (["ask", image_file, "An <image>?", "--model", folder], "the question has '<image>' in it"),
    ]
    for words, message in mistakes:
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith(f"clustrs: {message}")
        assert err.count("\n") == 1


def test_bad_models(run: Run, folder: Path, image_file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "model.safetensors").write_bytes(b"not weights")
    for model, message in [
        ("/no/such/folder", "model '/no/such/folder': there is no such folder"),
        (empty, f"model '{empty}' could not be loaded: "),
        (damaged, f"model '{damaged}' could not be loaded: "),
        ("nobody/nothing", "model 'nobody/nothing' could not be loaded: "),
    ]:
        code, out, err = run("ask", image_file, "What?", "--model", model)
        assert (code, out) == (2, "")
        assert err.startswith(f"clustrs: {message}")
        assert err.count("\n") == 1


def test_onevision_needs_no_torchvision_for_images(run: Run, image_file: Path, tmp_path: Path) -> None:
    tiny_models.build("llava_onevision", "siglip", tmp_path)
    assert json.loads((tmp_path / "processor_config.json").read_text())["processor_class"] == "LlavaOnevisionProcessor"
    code, out, err = run("ask", image_file, "What?", "--model", tmp_path, "--keep", 5, "--max-new-tokens", 2)
    assert (code, err) == (0, "")
    assert "5 of " in out


def test_model_is_left_as_it_was(folder: Path, image_file: Path) -> None:
    model, processor = load_model(str(folder))
    image = open_image(image_file)
    inputs = processor(images=[image], text=[chat_prompt(processor, "What?")], return_tensors="pt")
    model.generate(**inputs, max_new_tokens=1)  # transformers leaves marks of its own on the first call

    def state() -> dict[str, Any]:
        modules = model.named_modules()
        return {n: (set(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules}

    before = state()
    ask_model(model, processor, image, "What?", clustrs.ClustRS(keep=3), max_new_tokens=2)
    assert state() == before
    with pytest.raises(ValueError, match="max_new_tokens must be an integer of at least 1, got 0"):
        ask_model(model, processor, image, "What?", clustrs.ClustRS(keep=3), max_new_tokens=0)
    assert state() == before


def test_prompts() -> None:
    class Plain:
        image_token = "<image>"
        chat_template = None

    assert chat_prompt(Plain(), "What {is} it?") == "USER: <image>\nWhat {is} it? ASSISTANT:"


def test_prompt_by_template(folder: Path) -> None:
    _, processor = load_model(str(folder))
    assert chat_prompt(processor, "What?") == "user: <image> What? assistant:"


def test_what_the_base_crop_shows(folder: Path, anyres: Path) -> None:
    image = tiny_models.make_image(40, 60)
    pixels = np.asarray(image)
    _, processor = load_model(str(folder))
    assert (np.asarray(as_seen(processor, image)) == pixels[:, 10:50]).all()
    processor.image_processor.do_center_crop = False
    assert as_seen(processor, image).size == (60, 40)
    processor.image_processor.do_pad = True
    assert (np.asarray(as_seen(processor, image))[10:50] == pixels).all()
    _, processor = load_model(str(anyres))
    assert as_seen(processor, image).size == (60, 40)


def test_a_video(run: Run, folder: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    clip = tmp_path / "clip.mp4"
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for seed in range(12):
            container.mux(stream.encode(av.VideoFrame.from_image(tiny_models.make_image(64, 64, seed))))
        container.mux(stream.encode())
    words = ("ask", clip, "What is this?", "--model", folder, "--keep", "5", "--frames", "3", "--max-new-tokens", "2")
    for name in ("kept.png", "kept.gif", "kept.mp4"):
        code, out, err = run(*words, "--json", "--show", tmp_path / name)
        assert code == 0, err
        answer = json.loads(out)
        assert [len(answer["kept"]), sum(map(len, answer["kept"])), answer["visual_tokens"]] == [3, 5, 5]
        assert (tmp_path / name).stat().st_size > 500
    with av.open(str(tmp_path / "kept.mp4")) as drawn:
        assert sum(1 for _ in drawn.decode(video=0)) == 3
    for name in ("both.png", "both.gif", "both.mp4"):
        compared = (*words[1:], "--methods", "clustrs", "evs", "--json", "--show", tmp_path / name)
        code, out, err = run("compare", *compared)
        assert code == 0, err
        assert [sum(map(len, one["kept"])) for one in json.loads(out)["results"]] == [5, 5]
    with Image.open(tmp_path / "kept.gif") as alone, Image.open(tmp_path / "both.gif") as both:
        assert [len(list(ImageSequence.Iterator(one))) for one in (alone, both)] == [3, 3]
        assert both.size == (2 * alone.width, alone.height + draw.LINE)
    with av.open(str(tmp_path / "both.mp4")) as drawn:
        assert sum(1 for _ in drawn.decode(video=0)) == 3
    clip.write_bytes(b"nothing")
    code, _, err = run(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert "could not be read" in err
