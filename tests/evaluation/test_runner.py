"""The runner: every question answered once, failures counted, killed and resumed, the same in every order."""

import csv
import json
import multiprocessing
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from filelock import FileLock

from clustrs import run
from clustrs.corruptions.images import open_image
from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.report import write_report
from clustrs.evaluation.report.rerun import measure_latency
from clustrs.evaluation.results import load_run
from clustrs.evaluation.store import read_answers
from clustrs.models import ask as shared_encoding
from clustrs.models.ask import ask
from clustrs.models.load import load_model
from clustrs.pruners import from_dict

PRELOADED = ["clustrs.evaluation.runner", "transformers.models.llava", "transformers.models.clip"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and a task of our own with five images, one of them broken and one missing."""
    root = tmp_path_factory.mktemp("run")
    tiny_models.build("llava", "clip", root / "model")
    entries = []
    for number in range(5):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        common = {"image": f"{number}.png", "answer": "x"}
        entries += [{"id": f"{number}-{i}", "question": f"Why {i}?", **common} for i in range(2)]
    (root / "3.png").write_bytes((root / "3.png").read_bytes()[:200])
    (root / "4.png").unlink()
    (root / "questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return root


def config(made: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "task": "custom",
        "data": str(made),
        "model": str(made / "model"),
        "methods": expand_methods(["none", "clustrs", "random"], [4]),
        "corruptions": ("clean", "gaussian:0.5"),
        "seeds": (0, 1),
        "batch_size": 4,
        "max_new_tokens": 3,
    }
    return Config(**{**values, **changes})


def answers(folder: Path) -> dict[Any, Any]:
    records = list(read_answers(folder))
    results = {(record.item, record.method["name"], record.corruption, record.seed): record for record in records}
    assert len(results) == len(records)
    return results


def tables(folder: Path) -> dict[str, bytes]:
    """Every file of the report."""
    write_report(folder)
    return {name: (folder / name).read_bytes() for name in ("report.html", "report.md", "report.tex", "report.csv")}


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(config(made), folder, progress=False)
    return folder


def test_every_cell_is_there_and_failures_are_counted(whole: Path) -> None:
    results = answers(whole)
    assert len(results) == 10 * 3 * 2 * 2
    for (item, method, _, _), record in results.items():
        if item[0] in "34":
            assert record.text is None
            assert record.score is None
            assert "image" in record.error
        else:
            assert record.error is None
            assert isinstance(record.text, str)
            assert record.visual_tokens == (16 if method == "none" else 4)
            assert record.unpruned_tokens == 16
            assert len(record.kept) == (0 if method == "none" else 4)


def test_answers_are_those_of_asking_one_by_one(made: Path, whole: Path) -> None:
    from clustrs.corruptions import Corruption

    model, processor = load_model(str(made / "model"))
    for record in answers(whole).values():
        if record.error is None and record.seed == 1:
            image = open_image(made / record.image)
            if record.corruption != "clean":
                image = Corruption.parse(record.corruption).apply(image, record.image, record.seed)
            alone = ask(model, processor, image, record.question, from_dict(record.method), 3)
            assert alone.text == record.text


def test_the_tower_runs_once_per_image_and_corruption(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    original = shared_encoding.encode

    def counting(model: Any, processor: Any, images: Any, *more: Any) -> Any:
        shown.append(len(images))
        return original(model, processor, images, *more)

    monkeypatch.setattr(shared_encoding, "encode", counting)
    run(config(made), tmp_path, progress=False)
    assert sum(shown) == 3 * 4  # three good images, two corruptions, two seeds; all methods share them


def test_a_finished_run_does_nothing(made: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (whole / "answers.jsonl").read_bytes()
    monkeypatch.setattr("clustrs.models.load.load_model", lambda *_: pytest.fail("nothing is left to do"))
    run(config(made), whole, retry=False, progress=False)
    assert (whole / "answers.jsonl").read_bytes() == before
    run(config(made), whole, progress=False)  # images that still can't be read need no model
    assert sorted((whole / "answers.jsonl").read_bytes().splitlines()) == sorted(before.splitlines())


@pytest.mark.parametrize("cut", [0, 1, 700, 5000, 20001])
def test_resumes_after_any_torn_record(made: Path, whole: Path, tmp_path: Path, cut: int) -> None:
    content = (whole / "answers.jsonl").read_bytes()
    for name in ("config.json", "images.json"):
        tmp_path.joinpath(name).write_text((whole / name).read_text())
    tmp_path.joinpath("answers.jsonl").write_bytes(content[: max(0, len(content) - cut)])
    run(config(made), tmp_path, progress=False)
    assert answers(tmp_path) == answers(whole)


@pytest.mark.slow
def test_killed_at_random_moments(made: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL, three times, then to the end: the same answers. torch is imported once, by the server that forks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def start() -> BaseProcess:
        process = context.Process(target=run, args=(config(made), tmp_path), kwargs={"progress": False})
        process.start()
        return process

    moments, killed = random.Random(0), []
    for _ in range(3):
        process = start()
        size = (tmp_path / "answers.jsonl").stat().st_size if (tmp_path / "answers.jsonl").exists() else 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.is_alive():
            if (tmp_path / "answers.jsonl").exists() and (tmp_path / "answers.jsonl").stat().st_size > size:
                time.sleep(moments.uniform(0, 0.05))
                break
            time.sleep(0.01)
        process.kill()
        process.join()
        killed.append(process.exitcode)
    assert killed == [-signal.SIGKILL] * 3
    last = start()
    last.join()
    assert last.exitcode == 0
    assert answers(tmp_path) == answers(whole)
    assert tables(tmp_path) == tables(whole)


def test_refuses_another_configuration(made: Path, whole: Path) -> None:
    with pytest.raises(ValueError, match=r"another configuration.*seeds: now without 1.*--output"):
        run(config(made, seeds=(0,)), whole, progress=False)


def test_refuses_a_second_writer(made: Path, whole: Path) -> None:
    lock = FileLock(whole / "lock")
    with lock, pytest.raises(ValueError, match="another process is writing"):
        run(config(made), whole, progress=False)


def test_one_failed_generation_is_one_failure(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shared_encoding.reply

    def failing(
        model: Any, processor: Any, batch: shared_encoding.Batch, method: Any, *args: Any, **options: Any
    ) -> Any:
        texts = processor.batch_decode(batch.input_ids)
        if method.name == "clustrs" and any("Why 1?" in text for text in texts):
            raise RuntimeError("the device\nfell over")
        return original(model, processor, batch, method, *args, **options)

    monkeypatch.setattr(shared_encoding, "reply", failing)
    run(config(made, corruptions=("clean",), seeds=(0,)), tmp_path, progress=False)
    errors = {key: record.error for key, record in answers(tmp_path).items() if key[0][0] in "012" and record.error}
    assert set(errors) == {(f"{number}-1", "clustrs", "clean", 0) for number in range(3)}
    assert set(errors.values()) == {"the device fell over"}


def test_out_of_memory_is_not_a_failed_answer(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(shared_encoding, "reply", failing)
    with pytest.raises(ValueError, match="--batch-size"):
        run(config(made), tmp_path, progress=False)
    assert list(read_answers(tmp_path)) == []


def test_rubbish_in_the_record(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"item": 1}\n')
    with pytest.raises(ValueError, match=r"answers.jsonl' line 1: item must be str, got 1$"):
        list(read_answers(tmp_path))


def test_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    from clustrs.evaluation import runner

    seconds, told = iter([100.0, 160.0]), list[str]()
    monkeypatch.setattr(runner, "perf_counter", lambda: next(seconds))
    methods = ({"name": "none"}, {"name": "random", "keep": 4})
    config = Config(task="custom", model="m", methods=methods, corruptions=("clean", "gaussian:1"), seeds=(0, 1))
    forecast = runner.Forecast(config, 100, 8, told.append)
    assert told == [
        "800 answers: 2 methods x 2 corruptions x 2 seeds x 100 questions; 8 are there already, estimating the time "
        "from the first batch"
    ]
    for count in (24, 24, 24, 24):
        forecast.add(count)
    assert told[1:] == ["about 15 minutes for the other 720 answers"]  # 48 took a minute


def test_durations() -> None:
    from clustrs.evaluation.runner import duration

    shown = [duration(s) for s in (0.2, 45, 89, 100, 1234, 5300, 5400, 40000)]
    assert shown == [
        *("1 seconds", "45 seconds", "89 seconds", "1.7 minutes", "21 minutes", "88 minutes", "1.5 hours", "11 hours"),
    ]


def test_methods_inside_the_language_model(made: Path, tmp_path: Path) -> None:
    """Both budgets are stored and shown: that of the last layers, and the mean over the two layers of the model."""
    specs = ["none", "clustrs", "fastv layer=1", "fastervlm keep=8 + fastv layer=1"]
    settings = config(made, methods=expand_methods(specs, [4]), corruptions=("clean",), seeds=(0,))
    run(settings, tmp_path, progress=False)
    model, processor = load_model(str(made / "model"))
    averages = {"none": None, "clustrs": None, "fastv": (16 + 4) / 2, "compose": (8 + 4) / 2}
    for record in read_answers(tmp_path):
        if record.error is None:
            assert record.average_tokens == averages[record.method["name"]]
            assert record.visual_tokens == (16 if record.method["name"] == "none" else 4)
            image = open_image(made / record.image)
            alone = ask(model, processor, image, record.question, from_dict(record.method), 3)
            assert alone.text == record.text
            assert alone.image.average == record.average_tokens
            if record.method["name"] != "none":
                assert record.kept == alone.image.selection.indices.tolist()
    loaded = load_run(tmp_path)
    assert loaded.visual_tokens.tolist() == [16, 4, 4, 4]
    assert loaded.average_tokens.tolist() == [16, 4, 10, 6]
    report = tables(tmp_path)["report.md"].decode()
    assert "mean over layers" in report
    (row,) = [line for line in report.splitlines() if line.lower().startswith("| fastv") and "25 %" in line]
    assert [cell.strip() for cell in row.split("|")][2:6] == ["4", "4", "10", "25 %"]
    table = list(csv.DictReader(tables(tmp_path)["report.csv"].decode().splitlines()))
    shown = {row["method"]: (row["visual_tokens"], row["average_tokens"]) for row in table}
    assert [*shown.values()] == [("16", "16"), ("4", "4"), ("4", "10"), ("4", "6")]
    times = measure_latency(tmp_path, 1).milliseconds
    held = {method["name"]: own["kv_bytes"] for method, own in times}
    assert [held[name] / held["none"] for name in ("clustrs", "fastv", "compose")] == [4 / 16, 10 / 16, 6 / 16]


def test_commands_take_methods_inside_the_language_model(made: Path, request: pytest.FixtureRequest) -> None:
    run_cli = request.getfixturevalue("run")
    image, model = made / "0.png", ("--model", made / "model", "--max-new-tokens", 2, "--keep", 4)
    code, out, _ = run_cli("ask", image, "Why?", *model, "--method", "fastv layer=1")
    assert code == 0
    assert "kept 4 of 16 visual tokens (10 as a mean over layers)" in out
    pair = "fastervlm keep=8 + fastv layer=1"
    code, out, _ = run_cli("compare", image, "Why?", *model, "--methods", "none", pair, "dart layer=1")
    assert code == 0
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:5]] == ["none", "compose", "dart"]
    code, _, err = run_cli("ask", image, "Why?", *model, "--method", "fastv layer=2")
    assert code != 0
    assert "layer must be less than 2" in err
