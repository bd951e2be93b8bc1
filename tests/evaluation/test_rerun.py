"""What a report shows after the model ran again: drawings of disagreements, times of single answers."""

import base64
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from PIL import Image
from recorded_run import METHODS, Row, write_run

from clustrs import run as run_grid
from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.report import rerun, write_report
from clustrs.evaluation.report.rerun import draw_examples, find_disagreements, measure_latency
from clustrs.evaluation.results import load_run
from clustrs.evaluation.store import read_answers


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model whose answers to one question were made to differ in score."""
    root = tmp_path_factory.mktemp("rerun")
    tiny_models.build("llava", "clip", root / "model")
    entries = []
    for number in range(3):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        entries.append({"id": f"q{number}", "image": f"{number}.png", "question": "Why?", "answer": "x"})
    (root / "questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    config = Config(
        task="custom",
        data=str(root),
        model=str(root / "model"),
        methods=expand_methods(["none", "clustrs", "visionzip"], [4]),
        corruptions=("clean", "gaussian:2.0"),
        max_new_tokens=3,
    )
    run_grid(config, root / "run", progress=False)
    records = [json.loads(line) for line in (root / "run" / "answers.jsonl").read_text().splitlines()]
    for record in records:
        record["score"] = float(record["item"] == "q1" and record["method"]["name"] == "clustrs")
    (root / "run" / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root / "run"


def test_disagreements_are_drawn_and_kept(finished: Path) -> None:
    (example,) = draw_examples(finished, 5)
    assert (example.question, example.answer, example.where) == ("Why?", "x", "gaussian:2, keep 4, 1.png")
    assert [(one.method, one.right) for one in example.shown] == [
        ("ClustRS", True),
        ("VisionZip", False),
        ("unpruned", False),
    ]
    texts = {
        record.method["name"]: record.text
        for record in read_answers(finished)
        if (record.item, record.corruption) == ("q1", "gaussian:2.0")
    }
    assert [one.text for one in example.shown] == [texts[name] for name in ("clustrs", "visionzip", "none")]
    for one in example.shown:
        content = base64.b64decode(one.drawing.removeprefix("data:image/webp;base64,"))
        assert max(Image.open(BytesIO(content)).size) == rerun.SIZE
    first, second = (write_report(finished).read_bytes() for _ in range(2))
    assert first == second
    assert first.decode().count("<img") == 3


def test_times_are_measured_and_kept(finished: Path) -> None:
    measured = measure_latency(finished, 2)
    assert [dict(method)["name"] for method, _ in measured.milliseconds] == ["none", "clustrs", "visionzip"]
    parts = {"vision", "selection", "prefill", "decode", "kv_bytes"}
    assert all(set(times) == parts for _, times in measured.milliseconds)
    assert all(value > 0 for _, times in measured.milliseconds for value in times.values())
    text = write_report(finished).read_text()
    assert f"medians of 2 answers, one at a time, measured on {measured.machine}" in text
    assert "prefill ms" in text
    config = json.loads((finished.parent / "model" / "config.json").read_text())["text_config"]
    width = config["num_key_value_heads"] * config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    per_token = 2 * 4 * config["num_hidden_layers"] * width  # keys and values of 4 bytes
    answers = list(read_answers(finished))
    for method, times in measured.milliseconds:
        (read,) = {record.visual_tokens for record in answers if record.method["name"] == method["name"]}
        assert times["kv_bytes"] == per_token * (read or 0) > 0


def test_either_side_is_right_in_turn_and_images_change(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> list[Row]:
        """ClustRS answers the first eight items well, FasterVLM the others; two items share an image."""
        for row in rows:
            early = int(row["item"][3:]) < 8
            row["score"] = float(early == (row["method"]["name"] == "clustrs"))
        return rows

    run = load_run(write_run(tmp_path, change, corruptions=["clean", "jpeg:30"]))
    images = {item: str(int(item[3:]) // 2) for item in run.items}
    found = find_disagreements(run, 5, images)
    assert [run.methods[i].label for i in found[0].methods] == ["clustrs", "fastervlm", "none"]
    assert {run.methods[i].budget for one in found for i in one.methods[:2]} == {"4"}
    assert {str(run.conditions[one.condition]) for one in found} == {"jpeg:30"}
    right = [int(run.items[one.item][3:]) < 8 for one in found]
    assert right == [True, False, True, False, True]
    assert len({images[run.items[one.item]] for one in found}) == 5
    assert len(find_disagreements(run, 100, images)) == 12
    same = load_run(write_run(tmp_path, lambda rows: [{**row, "score": 1.0} for row in rows]))
    assert find_disagreements(same, 5, dict.fromkeys(same.items, "x")) == []
    alone = load_run(write_run(tmp_path, methods=METHODS[:1]))
    assert find_disagreements(alone, 5, dict.fromkeys(alone.items, "x")) == []


def test_the_command(run: Callable[..., tuple[int, str, str]], finished: Path) -> None:
    for name in ("examples.json", "latency.json"):
        (finished / name).unlink(missing_ok=True)
    code, out, err = run("report", finished, "--images", 1, "--latency", 1)
    assert (code, err) == (0, "")
    assert "report.html" in out
    assert len(json.loads((finished / "examples.json").read_text())) == 1
    assert json.loads((finished / "latency.json").read_text())["repeats"] == 1


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_counts_are_checked(finished: Path, count: Any) -> None:
    with pytest.raises(ValueError, match=f"images must be an integer of at least 1, got {count}"):
        draw_examples(finished, count)
    with pytest.raises(ValueError, match=f"latency must be an integer of at least 1, got {count}"):
        measure_latency(finished, count)
