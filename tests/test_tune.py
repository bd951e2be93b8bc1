"""`pruning.json`: written, read and refused, and used by the commands; and `tune`, which chooses what is in it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clustrs import ClusterMeans, ClustRS, Compose, Denoise, FastV, PruningConfig, ask, from_config, load_model, tune
from clustrs.cli import main
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path, model_folder, samples
from clustrs.evaluation.tuning import _Tuner
from clustrs.pruners import Pruner

QUESTION = "How many objects are there?"
WORDS = ("sample:scene-1", QUESTION, "--model", "mini-llava")
PLAIN = PruningConfig(method=ClustRS(keep=9, tau=2), positions="compact", attention="plain")


@pytest.fixture(scope="module")
def mini() -> tuple[Any, Any]:
    return load_model("mini-llava")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str) -> tuple[int, str, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    "method",
    [
        ClusterMeans(keep=0.25),
        Denoise(ClustRS(keep=4, clip=(0.1, 0.5)), keep=3),
        Compose(ClusterMeans(keep=144), FastV(keep=32, layer=8)),
    ],
    ids=lambda method: method.name,
)
def test_file_holds_every_method_and_option(method: Pruner, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scope": "crop", "crops": "base", "positions": "original", "attention": "plain"}
    config = PruningConfig(method=method, **options, deepstack="shrunk", tuned_on={"model": "ä", "images": 3})
    path = config.save_pretrained(tmp_path / "new")
    assert path == tmp_path / "new" / "pruning.json"
    assert os.listdir(path.parent) == ["pruning.json"]
    assert from_config(path) == from_config(path.parent) == from_config(json.loads(path.read_text())) == config


def test_file_says_what_it_holds(tmp_path: Path) -> None:
    stored = json.loads(PLAIN.save_pretrained(tmp_path).read_text())
    assert stored["method"]["name"] == "clustrs"
    assert stored["method"]["tau"] == 2
    assert [stored[name] for name in ("format", "positions", "attention")] == [1, "compact", "plain"]


def test_configuration_attaches_as_the_method_with_its_options(mini: tuple[Any, Any]) -> None:
    with PLAIN(mini[0]) as handle:
        assert (handle.method, handle.positions, handle.attention) == (PLAIN.method, "compact", "plain")
    with PLAIN(mini[0], positions="original") as handle:
        assert handle.positions == "original"


METHOD: dict[str, Any] = {"name": "clustrs", "keep": 16}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "the file must be an object"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "not text in UTF-8"),
        (b" " * 1_000_001, "too large, at most 1000000 bytes"),
        ({"method": METHOD}, "format must be 1, got None"),
        ({"format": 2, "method": METHOD}, "format must be 1, got 2"),
        ({"format": True, "method": METHOD}, "format must be 1, got True"),
        ({"format": 1}, "a method must be a dict with its name"),
        ({"format": 1, "method": "clustrs"}, "a method must be a dict with its name"),
        ({"format": 1, "method": {"name": "nope"}}, "unknown method 'nope'"),
        ({"format": 1, "method": {"name": "clustrs"}}, "keep is missing"),
        ({"format": 1, "method": {**METHOD, "tau": [1]}}, r"tau must be a number .*, got \[1\]"),
        ({"format": 1, "method": {**METHOD, "keep": 10**400}}, "keep must be a count"),
        ({"format": 1, "method": {**METHOD, "tua": 1}}, "has no parameter 'tua'"),
        ({"format": 1, "method": METHOD, "positions": 3}, "positions must be one of 'auto'"),
        ({"format": 1, "method": METHOD, "position": "auto"}, "unknown entry 'position' .did you mean 'positions'"),
        ({"format": 1, "method": METHOD, "tuned_on": [1]}, "tuned_on must be an object"),
        ('{"format": 1, "method": ' + '{"name": "denoise", "inner": ' * 20_000, "nested too deeply"),
    ],
)
def test_bad_file_is_refused_in_one_line(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are shortened in messages
    path = Path("pruning.json")
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message) as caught:
        from_config(path)
    assert str(caught.value).startswith(f"pruning configuration {str(path)!r}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_missing_file_and_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("none.json", "No such file"), ("fifo", "not a regular file"), ("", "No such file")):
        with pytest.raises(ValueError, match=message):
            from_config(tmp_path / name)


def test_ask_uses_the_file(tmp_path: Path, run: Any, mini: tuple[Any, Any]) -> None:
    code, out, err = run("ask", *WORDS, "--pruning", str(PLAIN.save_pretrained(tmp_path)), "--json")
    assert (code, err) == (0, "")
    stored = json.loads(out)
    assert stored["method"] == json.loads(json.dumps(PLAIN.method.to_dict()))
    assert (stored["positions"], stored["attention"], stored["visual_tokens"]) == ("compact", "plain", 9)
    image = open_image(image_path("sample:scene-1"))
    expected = ask(*mini, image, QUESTION, PLAIN.method, positions="compact", attention="plain")
    assert stored["kept"] == expected.image.selection.indices.tolist()


def test_file_beside_a_checkpoint_is_used_and_said_unless_a_method_is_given(tmp_path: Path, run: Any) -> None:
    for path in model_folder("mini-llava").iterdir():
        (tmp_path / path.name).symlink_to(path)
    PLAIN.save_pretrained(tmp_path)
    words = ("ask", *WORDS[:2], "--model", str(tmp_path), "--json")
    code, out, err = run(*words)
    assert code == 0
    assert err == f"clustrs: pruning with {tmp_path}/pruning.json: {PLAIN.method!r}\n"
    assert json.loads(out)["visual_tokens"] == 9
    code, out, err = run(*words, "--keep", "5")
    assert (code, err, json.loads(out)["visual_tokens"]) == (0, "", 5)


def test_compare_and_eval_measure_it_beside_the_unpruned_model(tmp_path: Path, run: Any) -> None:
    path = str(PLAIN.save_pretrained(tmp_path))
    code, out, _ = run("compare", *WORDS, "--pruning", path, "--json")
    assert code == 0
    assert [one["method"]["name"] for one in json.loads(out)["results"]] == ["none", "clustrs"]
    words = ("--model", "mini-llava", "--task", "scenes", "--limit", "2", "--quiet", "-o", str(tmp_path / "run"))
    assert run("eval", *words, "--pruning", path)[0] == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [method["name"] for method in stored["methods"]] == ["none", "clustrs"]
    assert (stored["methods"][1]["tau"], stored["positions"], stored["attention"]) == (2, "compact", "plain")


@pytest.mark.parametrize(
    "words",
    [
        ("ask", *WORDS, "--method", "divprune"),
        ("compare", *WORDS, "--methods", "none"),
        ("eval", "--keep", "16"),
        ("serve", "mini-llava", "--set", "tau=2"),
        ("export-onnx", "mini-llava", "-o", "x.onnx", "--keep", "4"),
    ],
    ids=lambda words: str(words[0]),
)
def test_file_and_options_of_pruning_exclude_each_other(words: tuple[str, ...], tmp_path: Path, run: Any) -> None:
    code, _, err = run(*words, "--pruning", str(PLAIN.save_pretrained(tmp_path)))
    reason = "exclude each other: the file has the method and all its options"
    assert (code, err) == (2, f"clustrs: --pruning and {words[-2]} {reason}\n")


def test_serve_and_export_take_the_method_from_the_file(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clustrs.serving import server

    seen: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *given: seen.append(given))
    path = str(PLAIN.save_pretrained(tmp_path))
    assert run("serve", "mini-llava", "--pruning", path, "--port", "1")[0] == 0
    model, described, options = seen[0]
    assert (model, options) == ("mini-llava", ("--port", "1"))
    expected = {"method": "clustrs", "keep": 9, "tau": 2, "positions": "compact", "attention": "plain"}
    assert expected.items() <= described.items()
    assert run("serve", "mini-llava")[2].startswith("clustrs: serve needs --keep K")
    crops = str(PruningConfig(method=ClustRS(keep=4), crops="base").save_pretrained(tmp_path / "crops"))
    message = "clustrs: --pruning: crops must be 'all' for serve, got 'base'\n"
    assert run("serve", "mini-llava", "--pruning", crops)[2] == message
    onnx = tmp_path / "select.onnx"
    code, out, err = run("export-onnx", "--tokens", "16", "--dim", "8", "--pruning", path, "-o", str(onnx))
    assert code == 0, err
    assert out.startswith(f"{onnx}: clustrs keeps 9 of 16 tokens")
    assert json.loads(onnx.with_suffix(".json").read_text())["method"]["tau"] == 2


PATHS = [sample.path for sample in samples("scenes")][:2]
ASKED = [QUESTION, "What is at the top left?"]
FEW: dict[str, Any] = {"methods": ["clustermeans", "divprune"], "keep": [64, 4]}


def by_hand(mini: tuple[Any, Any], path: Path, question: str, method: Pruner) -> str:
    return ask(*mini, open_image(path), question, method, 32).text


def test_measures_are_those_of_answers_by_hand(mini: tuple[Any, Any], tmp_path: Path) -> None:
    result = tune(*mini, PATHS, ASKED, target=0.01, output=tmp_path, methods=["clustermeans", "fastv"], keep=[16, 576])
    from clustrs import NoPruning, get_method

    for one in result.candidates:
        own = one.config.method
        pairs = [
            (by_hand(mini, path, text, get_method(own.name, keep=own.keep)), by_hand(mini, path, text, NoPruning()))
            for path in PATHS
            for text in ASKED
        ]
        if one.images == len(PATHS):
            assert one.means["exact"] == sum(first == second for first, second in pairs) / len(pairs)
    whole = next(one for one in result.candidates if one.config.method.keep == 576 and one.images == 2)
    assert (whole.means["exact"], whole.means["tokens"], whole.means["visual_tokens"]) == (1, 1, 576)
    assert whole.means["kl"] == pytest.approx(0, abs=1e-4)
    assert whole.means["kv_bytes"] == result.unpruned.means["kv_bytes"]
    assert from_config(tmp_path) == result.recommended.config  # type: ignore[union-attr]
    assert result.recommended.config.tuned_on["images"] == 2  # type: ignore[union-attr]
    assert result.sentence() in (tmp_path / "tune.md").read_text().replace("\\", "")


def test_log_probability_is_that_of_one_pass_over_prompt_and_answer(mini: tuple[Any, Any], tmp_path: Path) -> None:
    """The oracle feeds the model's own forward, unpruned, with prompt and answer at once."""
    from clustrs import chat_prompt

    result = tune(*mini, PATHS[:1], ASKED[:1], methods=["divprune"], keep=[1.0], output=tmp_path)
    record = json.loads((tmp_path / "tune.jsonl").read_text().splitlines()[-1])
    model, processor = mini
    text = chat_prompt(processor, QUESTION)
    inputs = processor(images=[open_image(PATHS[0])], text=[text], return_tensors="pt")
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    new = whole.shape[1] - inputs["input_ids"].shape[1]
    with torch.no_grad():
        out = model(input_ids=whole, pixel_values=inputs["pixel_values"], attention_mask=torch.ones_like(whole))
    expected = out.logits[0, -new - 1 : -1].log_softmax(-1).gather(1, whole[0, -new:, None]).mean()
    assert record["logprob"] == pytest.approx(float(expected), abs=1e-4)
    assert result.candidates[0].means["logprob"] == record["logprob"]


def test_interrupted_run_resumes_and_the_tower_runs_once_an_image(
    mini: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = _Tuner.measured, list[str]()

    def measured(self: _Tuner, config: PruningConfig, *rest: Any) -> Any:
        calls.append(config.method.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, config, *rest)

    monkeypatch.setattr(_Tuner, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        tune(*mini, PATHS[:1], ASKED, **FEW, output=tmp_path)
    kept = (tmp_path / "tune.jsonl").read_text()
    assert kept.count("\n") == 4  # the unpruned model and one candidate, two questions each
    (tmp_path / "tune.jsonl").write_text(kept + "torn")
    encoded: list[Any] = []
    encode = _Tuner.encode

    def counted(*given: Any) -> Any:
        encoded.append(1)
        return encode(*given)

    monkeypatch.setattr(_Tuner, "encode", counted)
    result = tune(*mini, PATHS[:1], ASKED, **FEW, output=tmp_path)
    assert (len(encoded), result.complete, [one.images for one in result.candidates]) == (1, True, [1] * 4)
    before = len(calls)
    assert tune(*mini, PATHS[:1], ASKED, **FEW, output=tmp_path).sentence() == result.sentence()
    assert len(calls) == before


def test_command_counts_unreadable_images_and_writes_the_configuration(tmp_path: Path, run: Any) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.png").symlink_to(PATHS[0])
    (photos / "b.png").write_bytes(b"no image")
    (tmp_path / "q.txt").write_text(f"{QUESTION}\n\nWas ist \u00e4\u4e2d?\n", encoding="utf-8")
    words = ("tune", "--model", "mini-llava", "--images", str(photos), "--questions", str(tmp_path / "q.txt"))
    out_folder = tmp_path / "out"
    few = ("--methods", "divprune", "--keep", "1.0", "--corrupt", "gaussian:0.1", "--quiet", "-o", str(out_folder))
    code, out, err = run(*words, *few)
    assert code == 0, err
    assert "b.png was left out" in err
    assert "keep 1 with divprune (576 of 576 visual tokens): 100.0 % agreement" in out
    assert from_config(out_folder).method.name == "divprune"
    assert "clean" in json.loads((out_folder / "pruning.json").read_text())["tuned_on"]
    assert run(*words, "--target", "1.1")[2] == "clustrs: --target must be a number above 0, at most 1, got 1.1\n"


def test_bad_input_of_tune_is_refused(mini: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        ((tmp_path,), "images must be a folder with images"),
        ((tmp_path / "gone",), "images must be a folder"),
        (([],), "images must be at least one image"),
        ((PATHS, [""]), "question must not be empty"),
        ((PATHS, ["\ud800"]), "questions must be texts"),
        ((PATHS, [["a"]]), "questions must be texts, or a list"),
        (([tmp_path / "gone.png"], ASKED), "none of 1 could be read"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(*mini, *arguments, **FEW)
    with pytest.raises(ValueError, match=r"target must be a number above 0, at most 1, got 1\.1"):
        tune(*mini, PATHS, target=1.1)
    monkeypatch.setattr(mini[1], "decode", lambda *_, **__: " ")
    with pytest.raises(ValueError, match="the unpruned model answers nothing"):
        tune(*mini, PATHS[:1], ASKED, **FEW)


def test_time_limit_and_failing_candidates(mini: tuple[Any, Any]) -> None:
    result = tune(*mini, PATHS, ASKED[:1], methods=["divprune", "fastv layer=99"], keep=[16], minutes=1e-9)
    assert (result.complete, result.unpruned.images) == (False, 1)
    failed = next(one for one in result.candidates if one.config.method.name == "fastv")
    assert (failed.images, failed.finalist) == (0, False)
    assert "layer must be less than" in str(failed.error)
    assert any("failed" in line for line in result.problems())
