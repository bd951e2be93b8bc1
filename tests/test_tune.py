"""`pruning.json`: written, read and refused, and used by the commands; and `tune`, which chooses what is in it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import BUILDERS, Load, make_image

from clustrs import (
    ClusterMeans,
    ClustRS,
    Compose,
    Denoise,
    FastV,
    PruningConfig,
    ask,
    chat_prompt,
    from_config,
    load_model,
    tune,
)
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path, model_folder
from clustrs.evaluation.tuning import Tuner
from clustrs.models import ask as shared
from clustrs.models.adapters.base import get_adapter
from clustrs.pruners import Pruner

QUESTION = "How many objects are there?"
WORDS = ("sample:scene-1", QUESTION, "--model", "mini-llava")
IMAGES = [make_image(40, 60, seed) for seed in range(3)]
ASKED = ["What?", "Where is it?"]
PLAIN = PruningConfig(method=ClustRS(keep=9, tau=2), positions="compact", attention="plain")


@pytest.fixture(scope="module")
def mini() -> tuple[Any, Any]:
    return load_model("mini-llava")


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
        (b"\xff", "must be a text in UTF-8"),
        (b" " * 1_000_001, "too large, at most 1000000 bytes"),
        ('{"format": 1, "format": 1}', "the key 'format' occurs twice"),
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
    assert str(caught.value).startswith(repr(str(path)))
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
        ("encode", "sample:scene-1", "-o", "x", "--keep", "4"),
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
    from clustrs import export
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
    exported: list[Any] = []

    def export_selection(*given: Any, **_: Any) -> Any:
        exported.append(given)
        return SimpleNamespace(kept=9, tokens=16, dim=8, dtype="float32")

    monkeypatch.setattr(export, "export_selection", export_selection)
    onnx = tmp_path / "select.onnx"
    assert run("export-onnx", "--tokens", "16", "--dim", "8", "--pruning", path, "-o", onnx)[::2] == (0, "")
    assert exported == [(PLAIN.method, onnx)]


def test_encode_takes_the_method_from_the_file(folder_of: Any, tmp_path: Path, run: Any) -> None:
    IMAGES[0].save(tmp_path / "a.png")
    words = ("encode", tmp_path / "a.png", "--model", folder_of("llava", "clip"), "-o", tmp_path / "encoded")
    code, out, err = run(*words, "--pruning", PLAIN.save_pretrained(tmp_path))
    assert code == 0, err
    assert "16 -> 9 visual tokens" in out
    assert run(*words)[2].startswith("clustrs: encode needs --keep K")


def test_load_model_attaches_what_is_beside_a_checkpoint(folder_of: Any, tmp_path: Path) -> None:
    for path in folder_of("llava", "clip").iterdir():
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ValueError, match="No such file"):
        load_model(str(tmp_path), pruned=True)
    PLAIN.save_pretrained(tmp_path)
    model, processor = load_model(str(tmp_path), pruned=True)
    inputs = processor(images=[IMAGES[0]], text=[chat_prompt(processor, "What?")], return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
    options: dict[str, Any] = {"positions": "compact", "attention": "plain"}
    expected = ask(*load_model(str(tmp_path)), IMAGES[0], "What?", PLAIN.method, 4, **options)
    assert processor.decode(ids, skip_special_tokens=True).strip() == expected.text
    assert expected.visual_tokens == 9


FEW: dict[str, Any] = {"methods": ["clustermeans", "divprune"], "keep": [8, 3], "max_new_tokens": 5}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tune.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize("family", BUILDERS)
def test_every_family(family: str, load_family: Any, tmp_path: Path) -> None:
    """The oracles are the model's own `generate` and `forward`, unpruned, and `ask` with the method."""
    model, processor = load_family(family)
    search: dict[str, Any] = {"methods": ["divprune keep=1.0", "clustermeans keep=3"], "max_new_tokens": 5}
    result = tune(model, processor, IMAGES[:1], ASKED[:1], **search, output=tmp_path)
    assert result.problems() == []
    whole, few = result.candidates
    for one in (result.unpruned, whole):
        assert [one.means[name] for name in ("exact", "agreement", "tokens")] == [1, 1, 1]
        assert one.means["kl"] == pytest.approx(0, abs=1e-5)
        assert one.means["visual_tokens"] == one.means["unpruned_tokens"]
    stored = {one["candidate"]: one for one in records(tmp_path)}
    unpruned, first, second = stored.values()
    images = get_adapter(model).batch_images(IMAGES[:1])
    inputs = dict(processor(images=images, text=[chat_prompt(processor, ASKED[0])], return_tensors="pt"))
    inputs.pop("labels", None)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    new = ids[:, inputs["input_ids"].shape[1] :]
    text = processor.decode(new[0], skip_special_tokens=True).strip()
    assert [one["answer"] for one in (unpruned, first)] == [text, text]
    answer = ask(model, processor, IMAGES[0], ASKED[0], ClusterMeans(keep=3), 5)
    assert (second["answer"], few.means["visual_tokens"]) == (answer.text, answer.visual_tokens)
    assert second["values"]["kl"] > 1e-6
    types = [name for name in ("token_type_ids", "mm_token_type_ids") if name in inputs]
    inputs |= {name: torch.cat([inputs[name], torch.zeros_like(new)], 1) for name in types}
    with torch.no_grad():
        out = model(**{**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    expected = out.logits[0, -new.shape[1] - 1 : -1].log_softmax(-1).gather(1, new[0][:, None]).mean()
    if not family.startswith("paligemma"):  # which reads a prompt in both directions: with its answer it is another
        assert result.unpruned.means["logprob"] == pytest.approx(float(expected), abs=1e-4)


def test_means_and_files(load: Load, tmp_path: Path) -> None:
    result = tune(*load(), IMAGES, ASKED, **FEW, target=0.01, output=tmp_path)
    stored = [one for one in records(tmp_path) if '"name": "none"' not in one["candidate"]]
    for one in result.candidates:
        method = json.loads(json.dumps(one.config.method.to_dict()))
        own = [r for r in stored if json.loads(r["candidate"])["method"] == method]
        by_hand = [float(r["answer"].lower() == r["reference"].lower()) for r in own]
        assert len(by_hand) == 2 * one.images
        assert one.means["agreement"] == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-6)
        assert one.finalist == (one.images == 3)
    assert [one.keep for one in result.candidates] == [8, 8, 3, 3]
    assert [sum(one.images == 3 for one in result.candidates if one.keep == keep) for keep in (8, 3)] == [1, 1]
    chosen = result.recommended
    assert chosen is not None
    assert (chosen.keep, chosen.finalist) == (3, True)
    assert from_config(tmp_path) == chosen.config
    assert (chosen.config.tuned_on["images"], chosen.config.tuned_on["questions"]) == (3, 2)
    assert result.spelled().sentence() in (tmp_path / "tune.md").read_text().replace("\\", "")
    page = (tmp_path / "tune.html").read_text()
    assert page.count("<svg") >= 2
    assert "Pareto front" in page


def test_sentence_has_interval_and_next_budget(load: Load) -> None:
    result = tune(*load(), IMAGES, ASKED, methods=["divprune"], keep=[3, 8, 1.0], max_new_tokens=5, target=1)
    assert [str(one.keep) for one in result.candidates] == ["1.0", "8", "3"]
    assert result.sentence().startswith(
        "keep 1.0 with divprune (16 of 16 visual tokens): 100.0 % agreement (100.0 to 100.0, 3 images), "
    )
    following = result.candidates[1]
    assert result.sentence().endswith(f"keep 8 with divprune: {100 * following.means['agreement']:.1f} %")
    assert result.figures()[0].ticks == ("3", "8", "1.0")


def test_target_that_is_missed_leaves_no_old_configuration(load: Load, tmp_path: Path) -> None:
    model, processor = load()
    few: dict[str, Any] = {"methods": ["divprune"], "max_new_tokens": 5, "output": tmp_path}
    assert tune(model, processor, IMAGES, ASKED, **few, keep=[1.0]).recommended is not None
    before = from_config(tmp_path)
    result = tune(model, processor, IMAGES, ASKED, **few, keep=[1], target=1)
    assert result.sentence().startswith("no candidate reaches 100.0 %; the best is keep 1 with divprune")
    assert not (tmp_path / "pruning.json").exists()
    assert from_config(tmp_path / "pruning.json.old") == before


def test_interrupted_run_resumes_and_the_tower_runs_once_an_image(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini, calls, encoded = load(), list[str](), list[Any]()
    measured, encode = Tuner.measured, shared.encode

    def interrupted(self: Tuner, config: PruningConfig, *rest: Any) -> Any:
        calls.append(config.method.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measured(self, config, *rest)

    monkeypatch.setattr(Tuner, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(*mini, IMAGES[:1], ASKED, **FEW, output=tmp_path)
    kept = (tmp_path / "tune.jsonl").read_text()
    assert kept.count("\n") == 4  # the unpruned model and one candidate, two questions each
    (tmp_path / "tune.jsonl").write_text(kept + "torn")

    def counted(*given: Any, **more: Any) -> Any:
        encoded.append(1)
        return encode(*given, **more)

    monkeypatch.setattr(shared, "encode", counted)
    result = tune(*mini, IMAGES[:1], ASKED, **FEW, output=tmp_path)
    assert (len(encoded), result.complete, [one.images for one in result.candidates]) == (1, True, [1] * 4)
    before = len(calls)
    assert tune(*mini, IMAGES[:1], ASKED, **FEW, output=tmp_path).sentence() == result.sentence()
    assert len(calls) == before
    assert tune(*mini, IMAGES[:1], ASKED, **{**FEW, "max_new_tokens": 4}, output=tmp_path).complete
    assert len(calls) > before  # other answers, so nothing can be reused


def test_command(folder_of: Any, tmp_path: Path, run: Any) -> None:
    photos, out_folder = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    IMAGES[0].save(photos / "a.png")
    (photos / "b.png").write_bytes(b"no image")
    questions = tmp_path / "q.txt"
    questions.write_text("What?\n\nWas ist \u00e4\u4e2d\U0001f600 \x07 \u202e?\n", encoding="utf-8")
    words = ("tune", "--model", folder_of("llava", "clip"), "--quiet", "-o", out_folder, "--max-new-tokens", 4)
    few = (*words, "--methods", "divprune", "--keep", "1.0", "--corrupt", "gaussian:0.1")
    code, out, err = run(*few, "--images", photos, "--questions", questions)
    assert code == 0, err
    assert "b.png was left out" in err
    assert "keep 1.0 with divprune (16 of 16 visual tokens): 100.0 % agreement (100.0 to 100.0, 1 image)" in out
    tuned = from_config(out_folder)
    assert (tuned.method.name, tuned.tuned_on["questions"]) == ("divprune", 2)
    assert 0 <= tuned.tuned_on["clean"] <= 1
    pairs = tmp_path / "q.jsonl"
    pairs.write_text('{"image": "photos/a.png", "question": "Who?"}\n{"image": "photos/a.png", "question": "Why?"}\n')
    assert run(*few, "--questions", pairs)[0] == 0
    assert from_config(out_folder).tuned_on["questions"] == 2
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for more, message in (
        (("--images", photos, "--target", "1.1"), "target must be a number above 0, at most 1, got 1.1"),
        (("--images", photos, "--minutes", "0"), "minutes must be a number above 0, got 0.0"),
        ((), "tune needs --images FOLDER, or --questions FILE.jsonl with an image in each line"),
        (("--images", photos, "--questions", empty), f"--questions {str(empty)!r}: there is no question in it"),
        (("--questions", empty.with_suffix(".jsonl")), f"'{empty}l' cannot be read: No such file or directory"),
    ):
        assert run(*words, *more)[::2] == (2, f"clustrs: {message}\n".replace(".txtl", ".jsonl"))


def test_bad_input_of_tune_is_refused(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mini = load()
    for arguments, message in (
        ((tmp_path,), "images must be a folder with images"),
        ((tmp_path / "gone",), "images must be a folder"),
        (([],), "images must be at least one image"),
        ((IMAGES, [""]), "question must not be empty"),
        ((IMAGES, ["\ud800"]), "questions must be texts"),
        ((IMAGES, [["a"]]), "questions must be texts, or a list"),
        (([tmp_path / "gone.png"], ASKED), "none of 1 could be read"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(*mini, *arguments, **FEW)
    with pytest.raises(ValueError, match=r"target must be a number above 0, at most 1, got 1\.1"):
        tune(*mini, IMAGES, target=1.1)
    monkeypatch.setattr(mini[1], "decode", lambda *_, **__: " ")
    with pytest.raises(ValueError, match="the unpruned model answers nothing"):
        tune(*mini, IMAGES[:1], ASKED, **FEW)


def test_time_limit_and_failing_candidates(load: Load) -> None:
    methods = ["divprune", "fastv layer=99"]
    result = tune(*load(), IMAGES, ASKED[:1], methods=methods, keep=[3], minutes=1e-9, max_new_tokens=4)
    assert (result.complete, result.unpruned.images) == (False, 1)
    failed = next(one for one in result.candidates if one.config.method.name == "fastv")
    assert (failed.images, failed.finalist) == (0, False)
    assert "layer must be less than" in str(failed.error)
    assert any("failed" in line for line in result.problems())
    assert "the time was over before all images were seen" in result.problems()


def test_logits_that_are_not_numbers_are_an_error(load: Load) -> None:
    model, processor = load()
    broken = PruningConfig(method=ClusterMeans(keep=3))
    tuner = Tuner(model, processor, 4)
    assert tuner.see(IMAGES[0], ASKED[:1], [])
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the model's logits are not numbers"):
        tuner.see(IMAGES[1], ASKED[:1], [broken])
