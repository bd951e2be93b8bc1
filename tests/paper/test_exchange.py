"""Answers go out in the formats of others and come back in, and bad files are told apart from good ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation.task_files import real, science, write_json
from judge_server import answer_record, write_answers
from PIL import Image

from clustrs.evaluation.tasks import Item, Task, fingerprint, get_task
from clustrs_paper.exchange import export_run, import_predictions, import_run

TEXTS = {"v1_0": "x = -1", "v1_1": 'a "quote", é, 犬 |\n\nand a line', "v1_12": "", "sqa-7": "B"}


class Colours:
    """A task with four questions; the answer is right when it holds the expected word."""

    name = "colours"
    max_new_tokens = 8
    scale = 100.0

    def __init__(self, judged: bool = False) -> None:
        self.judged = judged
        self.items: Sequence[Item] = [
            Item(id, f"{id}.png", f"What is {id}?", "red", ("ocr", "math")) for id in ("v1_0", "v1_1", "v1_12", "sqa-7")
        ]

    def open(self, image: str) -> Image.Image:
        raise ValueError(f"nobody looks at {image}")

    def score(self, item: Item, text: str) -> float | None:
        return None if self.judged else float(item.answer in text)


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    write_answers(folder, records)
    (folder / "config.json").write_text(json.dumps({"task": "mmvet", "model": "llava-hf/llava-1.5-7b-hf"}))
    return folder


def test_mmvet_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [answer_record(item, text) for item, text in TEXTS.items()])
    [path] = export_run(run, "mmvet", tmp_path / "deep" / "out")
    assert path == tmp_path / "deep" / "out" / "clustrs-16_clean_seed-0.json"
    assert json.loads(path.read_text(encoding="ascii")) == TEXTS


def test_llava_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [answer_record(item, text) for item, text in TEXTS.items()])
    [path] = export_run(run, "llava", tmp_path)
    assert path.name == "clustrs-16_clean_seed-0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(record) for record in records] == [
        ["question_id", "prompt", "text", "answer_id", "model_id", "metadata"]
    ] * 4
    assert records[0]["prompt"] == "<image>\nWhat is v1_0?"
    assert records[0]["model_id"] == "llava-hf/llava-1.5-7b-hf"
    assert records[0]["metadata"] == {"method": {"name": "clustrs", "keep": 16}, "corruption": "clean", "seed": 0}
    assert len({record["answer_id"] for record in records}) == 4
    # LLaVA's converter for MM-Vet puts v1_ before the number
    assert [record["question_id"] for record in records] == [0, 1, 12, "sqa-7"]
    assert {f"v1_{record['question_id']}": record["text"] for record in records[:3]} == {
        item: text for item, text in TEXTS.items() if item.startswith("v1_")
    }
    before = path.read_bytes()
    export_run(run, "llava", tmp_path)
    assert path.read_bytes() == before


def test_a_file_for_each_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Method, corruption and seed are in the name; parameters where the name and the budget are the same."""
    methods: list[dict[str, Any]] = [
        {"name": "none", "keep": 1.0},
        {"name": "clustrs", "keep": 16, "tau": 1.0, "shrink": True},
        {"name": "clustrs", "keep": 16, "tau": 2.0, "shrink": True},
        {"name": "clustrs", "keep": 0.25, "tau": 1.0, "shrink": True},
    ]
    cells = [("clean", 0), ("gaussian:0.5", 0), ("gaussian:0.5", 1)]
    records = [
        answer_record("v1_0", f"{number} {corruption} {seed}", method=method, corruption=corruption, seed=seed)
        for number, method in enumerate(methods)
        for corruption, seed in cells
    ]
    records += [answer_record("v1_1", None, method=methods[1]), answer_record("v1_1", None, method=methods[0])]
    files = export_run(write_run(tmp_path / "run", records), "mmvet", tmp_path / "out")
    names = ["none", "clustrs-16_tau-1.0", "clustrs-16_tau-2.0", "clustrs-0.25"]
    assert {path.name: json.loads(path.read_text()) for path in files} == {
        f"{name}_{corruption.replace(':', '-')}_seed-{seed}.json": {"v1_0": f"{number} {corruption} {seed}"}
        for number, name in enumerate(names)
        for corruption, seed in cells
    }
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert capsys.readouterr().err == "2 failed answers are left out\n"


def test_names_stay_in_the_folder(tmp_path: Path) -> None:
    names = ["../../evil", "..-..-evil", "/etc/x", "evil*", "EVIL?", "x" * 300, "ж", "\x00"]
    records = [answer_record("v1_0", name, method={"name": name}) for name in names]
    files = export_run(write_run(tmp_path / "run", records), "mmvet", tmp_path / "out")
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    assert len({path.name.lower() for path in files}) == len(names)
    assert [json.loads(path.read_text())["v1_0"] for path in files] == names
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


@pytest.mark.parametrize("format", ["mmvet", "llava"])
def test_round_trip(tmp_path: Path, format: str) -> None:
    run = write_run(tmp_path / "run", [answer_record(item, text) for item, text in TEXTS.items()])
    [path] = export_run(run, format, tmp_path / "out")
    predictions = import_predictions(path, format)
    assert predictions == TEXTS
    task = Colours()
    import_run(task, predictions, "theirs", tmp_path / "again")
    [back] = export_run(tmp_path / "again", format, tmp_path / "out")
    assert back.stem == "theirs-1.0_clean_seed-0"
    assert import_predictions(back, format) == TEXTS


def test_imported_run(tmp_path: Path) -> None:
    task: Task = Colours()
    import_run(task, {"v1_0": "it is red", "sqa-7": "blue"}, "theirs", tmp_path / "deep" / "run")
    records = [json.loads(line) for line in (tmp_path / "deep" / "run" / "answers.jsonl").read_text().splitlines()]
    assert [record["item"] for record in records] == ["v1_0", "v1_1", "v1_12", "sqa-7"]
    assert all(record.keys() == answer_record("v1_0", "t").keys() for record in records)
    assert records[0] == {
        "item": "v1_0",
        "image": "v1_0.png",
        "kinds": ["ocr", "math"],
        "question": "What is v1_0?",
        "answer": "red",
        "method": {"name": "theirs", "keep": 1.0},
        "corruption": "clean",
        "seed": 0,
        "text": "it is red",
        "score": 1.0,
        "error": None,
        "kept": [],
        "visual_tokens": None,
        "unpruned_tokens": None,
    }
    assert [(record["text"], record["score"], record["error"], record["kept"]) for record in records[1:]] == [
        (None, None, "no prediction", None),
        (None, None, "no prediction", None),
        ("blue", 0.0, None, []),
    ]
    config = json.loads((tmp_path / "deep" / "run" / "config.json").read_text())
    assert config["fingerprint"] == fingerprint(task)
    shown = {key: config[key] for key in ("task", "methods", "corruptions", "seeds", "judged", "scale", "items")}
    assert shown == {
        "task": "colours",
        "methods": [{"name": "theirs", "keep": 1.0}],
        "corruptions": ["clean"],
        "seeds": [0],
        "judged": False,
        "scale": 100.0,
        "items": 4,
    }


def test_imported_run_of_a_judged_task(tmp_path: Path) -> None:
    import_run(Colours(judged=True), {"v1_0": "it is red"}, "theirs", tmp_path)
    record = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    assert (record["text"], record["score"], record["error"]) == ("it is red", None, None)
    assert json.loads((tmp_path / "config.json").read_text())["judged"] is True


def test_import_refuses(tmp_path: Path) -> None:
    task = Colours()
    with pytest.raises(ValueError, match=r"4 of the predictions .* colours doesn't have: 'a', 'b', 'c', ...$"):
        import_run(task, dict.fromkeys(["v1_0", *"abcd"], "red"), "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"name must be .* got ' '"):
        import_run(task, TEXTS, " ", tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="there already"):
            import_run(task, TEXTS, "theirs", folder)
    with pytest.raises(ValueError, match="cannot be written"):
        import_run(task, TEXTS, "theirs", tmp_path / "file" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ": not JSON"),
        (b"\xff\xfe", "must be a text in UTF-8"),
        (b'{"v1_0": "a"', ": not JSON"),
        (b"[" * 100_000, ": not JSON"),
        (b'["v1_0", "a"]', "expected an object, got "),
        (b'"v1_0"', "expected an object, got "),
        (b"{}", "holds no predictions"),
        (b'{"v1_0": "a", "v1_1": "b", "v1_0": "c"}', "the key 'v1_0' occurs twice"),
        (b'{"v1_0": "a", "v1_1": null}', "got 'v1_1' and None"),
        (b'{"v1_0": {"v1_1": "a"}}', "got 'v1_0' and "),
        (b'{"v1_0": 1}', "got 'v1_0' and 1"),
        (b'{"": "a"}', "got '' and 'a'"),
    ],
)
def test_bad_mmvet_files(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        import_predictions(tmp_path / "file.json", "mmvet")
    assert "file.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "holds no predictions"),
        (b'{"question_id": 0, "text": "a"}\n{"question_id": 1, "te', "line 2: not JSON"),
        (b'{"question_id": 0, "text": "a"}\n\xff\n', "must be a text in UTF-8"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"[0]", "line 1: expected an object"),
        (b'{"v1_0": "a"}', "line 1: question_id must be str or int, got nothing"),
        (b'{"question_id": true, "text": "a"}', "question_id must be .* got True"),
        (b'{"question_id": 1.5, "text": "a"}', "question_id must be .* got 1.5"),
        (b'{"question_id": "", "text": "a"}', "got '' and 'a'"),
        (b'{"question_id": 1}', "text must be str, got nothing"),
        (b'{"question_id": 1, "text": null}', "text must be str, got None"),
        (b'{"question_id": 1, "text": "a"}\n\n{"question_id": "v1_1", "text": "a"}', "line 3: 'v1_1' is there twice"),
    ],
)
def test_bad_llava_files(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        import_predictions(tmp_path / "file.jsonl", "llava")
    assert "file.jsonl" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_files_of_others(tmp_path: Path) -> None:
    """With a byte order mark, other line ends, blank lines, and keys that mean nothing here."""
    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"v1_0": "a"}')
    assert import_predictions(path, "mmvet") == {"v1_0": "a"}
    path.write_bytes(
        b'\xef\xbb\xbf{"question_id": "11", "text": "A", "options": []}\r\n\r\n{"question_id": 3, "text": ""}'
    )
    assert import_predictions(path, "llava") == {"11": "A", "v1_3": ""}


def test_bad_calls(tmp_path: Path) -> None:
    for call in (
        lambda: export_run(tmp_path, "csv", tmp_path),
        lambda: import_predictions(tmp_path, "csv"),
    ):
        with pytest.raises(ValueError, match="format must be one of 'mmvet', 'llava', got 'csv'"):
            call()
    with pytest.raises(ValueError, match="cannot be read"):
        import_predictions(tmp_path / "nothing", "mmvet")
    with pytest.raises(ValueError, match="cannot be read"):
        import_predictions(tmp_path, "llava")
    with pytest.raises(ValueError, match=r"no answers.jsonl"):
        export_run(tmp_path, "mmvet", tmp_path)
    run = write_run(tmp_path / "run", [answer_record("v1_0", "t")])
    with pytest.raises(ValueError, match="cannot be written"):
        export_run(run, "mmvet", run / "config.json")
    (run / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        export_run(run, "llava", tmp_path / "out")


def llava_answers(path: Path, entries: list[dict[str, Any]], text: str = "A") -> Path:
    """Answers as LLaVA's script for ScienceQA writes them: one for every question, with an image or without."""
    records = [
        {"question_id": entry["id"], "prompt": entry["conversations"][0]["value"], "text": text, "model_id": "m"}
        for entry in entries
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_all_scienceqa_answers_of_llava(run: Any, tmp_path: Path) -> None:
    entries = json.loads((real("scienceqa") / "llava_test_CQM-A.json").read_text())
    assert len(entries) == 4241
    words = ("--task", "scienceqa", "--data", real("scienceqa"), "--format", "llava", "-o", tmp_path / "run")
    code, out, err = run("import-answers", llava_answers(tmp_path / "answers.jsonl", entries), *words)
    assert code == 0
    assert err == "2224 of 4241 predictions set aside: their questions have no image\n"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["items"], config["set_aside"]) == (2017, 2224)
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert len(records) == 2017
    assert sum(record["score"] for record in records) == 713
    assert f"{100 * 713 / 2017:.1f}" in out


def test_answers_without_an_image_are_set_aside(tmp_path: Path) -> None:
    with_image, bare = science("1", "<image>\nWhich?\nA. x\nB. y", "A"), science("2", "?\nA. x\nB. y", "B", image=None)
    write_json(tmp_path / "llava_test_CQM-A.json", [with_image, bare, {"conversations": []}])
    task = get_task("scienceqa", tmp_path)
    both = import_predictions(llava_answers(tmp_path / "answers.jsonl", [with_image, bare]), "llava")
    assert import_run(task, both, "m", tmp_path / "run") == 1
    assert import_run(task, {"1": "A"}, "m", tmp_path / "other") == 0
    with pytest.raises(ValueError, match=r"1 of the predictions are for questions that scienceqa doesn't have: '3'"):
        import_run(task, {**both, "3": "A"}, "m", tmp_path / "third")
    with pytest.raises(ValueError, match="none of the predictions is for a question of scienceqa that has an image"):
        import_run(task, {"2": "A"}, "m", tmp_path / "third")
    assert not (tmp_path / "third").exists()
