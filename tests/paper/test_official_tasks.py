"""MM-Vet and ScienceQA: the official words, the rule that parses answers, bad files, and datasets of the hub."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from evaluation.task_files import INSTRUCTION, real, science, vet, write_image, write_json
from PIL import Image

from clustrs.evaluation.tasks import Item, get_task
from clustrs.evaluation.tasks.custom import chosen
from clustrs.models.ask import chat_prompt
from clustrs_paper.tasks import MMVET_ADVICE, SCIENCEQA_ADVICE


def test_mmvet_official_questions() -> None:
    data = real("mm-vet")
    task = get_task("mmvet", data=data)
    counts = Counter(kind for item in task.items for kind in item.kinds)
    assert len(task.items) == 218
    assert counts == {"rec": 150, "ocr": 96, "know": 84, "gen": 80, "spat": 75, "math": 26}
    assert len({item.image for item in task.items}) == 200
    assert task.judged
    first = task.items[0]
    assert (first.id, first.image, first.answer) == ("v1_0", "v1_0.png", "-1<AND>-5")
    assert (first.question, first.kinds) == ("What is x in the equation?", ("ocr", "math"))
    assert task.score(first, "-1") is None
    written = json.loads((data / "mm-vet.json").read_text())
    assert [item.question for item in task.items] == [entry["question"] for entry in written.values()]


def test_mmvet_official_images() -> None:
    task = get_task("mmvet", data=real("mm-vet"), limit=5)
    assert [item.id for item in task.items] == ["v1_0", "v1_1", "v1_2", "v1_3", "v1_4"]
    for item in task.items:
        image = task.open(item.image)
        assert image.mode == "RGB"
        with Image.open(real("mm-vet") / "images" / item.image) as file:
            assert image.size == file.size


def test_mmvet_own_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "mm-vet.json", {"q": vet(capability=["ocr", "ocr", "rec"])})
    write_image(tmp_path / "images" / "a.png", (1, 2, 3))
    task = get_task("mmvet", data=str(tmp_path))
    assert task.items == [Item("q", "a.png", "What is x?", "-1<AND>-5", ("ocr", "rec"))]
    assert task.open("a.png").getpixel((0, 0)) == (1, 2, 3)
    assert (task.name, task.scale, task.max_new_tokens) == ("mmvet", 100.0, 1024)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "mm-vet.json: not JSON"),
        ("{", r"mm-vet.json: not JSON \(.*line 1 column 2"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "no questions"),
        ('{"q": {}, "q": {}}', "the key 'q' occurs twice"),
        ({"q": 3}, "entry 'q': expected a JSON object, got 3"),
        ({"q": vet(question=...)}, "entry 'q': question must be .* got nothing"),
        ({"q": vet(question="  ")}, "question must be .* got '  '"),
        ({"q": vet(answer=5)}, "answer must be a string.* got 5"),
        ({"q": vet(answer="\ud800")}, "answer must be "),
        ({"q": vet(capability="ocr")}, "capability must be a list.* got 'ocr'"),
        ({"q": vet(capability=["ocr", 1])}, "capability must be "),
        ({"q": vet(imagename="../a.png")}, "imagename must be a path inside the folder.* got '../a.png'"),
        ({"q": vet(imagename="/etc/passwd")}, "imagename must be .* got '/etc/passwd'"),
        ({"q": vet(imagename=r"b\..\..\a.png")}, "imagename must be "),
        ({"q": vet(imagename="C:a.png")}, "imagename must be "),
    ],
)
def test_mmvet_bad_files(tmp_path: Path, content: Any, message: str) -> None:
    write_json(tmp_path / "mm-vet.json", content)
    with pytest.raises(ValueError, match=message) as caught:
        get_task("mmvet", data=tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_mmvet_not_text(tmp_path: Path) -> None:
    (tmp_path / "mm-vet.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="must be a text in UTF-8"):
        get_task("mmvet", data=tmp_path)


def test_mmvet_missing_folder_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no mm-vet.json in it: .*MM-Vet/releases"):
        get_task("mmvet", data=tmp_path)
    with pytest.raises(ValueError, match=r"there is no such folder: .*MM-Vet/releases"):
        get_task("mmvet", data=tmp_path / "nowhere")


def test_mmvet_bad_images(tmp_path: Path) -> None:
    names = ["missing.png", "broken.png", "folder.png", "cut.png", "x" * 300 + ".png"]
    write_json(tmp_path / "mm-vet.json", {name: vet(imagename=name) for name in names})
    images = tmp_path / "images"
    (images / "folder.png").mkdir(parents=True)
    (images / "broken.png").write_text("no image")
    write_image(images / "whole.png")
    (images / "cut.png").write_bytes((images / "whole.png").read_bytes()[:40])
    task = get_task("mmvet", data=tmp_path)
    for item in task.items:
        with pytest.raises(ValueError, match=r"^image "):
            task.open(item.image)


def test_mmvet_open_stays_in_the_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "mm-vet.json", {"q": vet()})
    write_image(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="outside"):
        get_task("mmvet", data=tmp_path).open("../secret.png")


def test_scienceqa_official_questions() -> None:
    data = real("scienceqa")
    task = get_task("scienceqa", data=data)
    assert len(task.items) == 2017
    kinds = Counter(item.kinds for item in task.items)
    assert kinds == {("2 choices",): 677, ("3 choices",): 532, ("4 choices",): 770, ("5 choices",): 38}
    assert Counter(item.answer for item in task.items) == {"A": 713, "B": 726, "C": 375, "D": 195, "E": 8}
    eleven = next(item for item in task.items if item.id == "11")
    assert eleven.question == (
        "What is the name of the colony shown?\nA. Maryland\nB. New Hampshire\nC. Rhode Island\nD. Vermont\n"
        "Answer with the option's letter from the given choices directly."
    )
    written = [entry for entry in json.loads((data / "llava_test_CQM-A.json").read_text()) if "image" in entry]
    for item, entry in zip(task.items, written, strict=True):
        text, letter = (turn["value"] for turn in entry["conversations"])
        assert f"<image>\n{item.question}" == f"{text}\n{INSTRUCTION}"
        assert (item.id, item.image, item.answer) == (entry["id"], entry["image"], letter)


def test_scienceqa_official_images() -> None:
    task = get_task("scienceqa", data=real("scienceqa"), present=True)
    assert len(task.items) == 300
    assert task.open(task.items[0].image).mode == "RGB"
    whole = get_task("scienceqa", data=real("scienceqa"))
    there = {item.id for item in task.items}
    absent = next(item for item in whole.items if item.id not in there)
    with pytest.raises(ValueError, match="there is no such file"):
        whole.open(absent.image)


def test_llava_gets_what_its_own_script_sends(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", [science("7", "<image>\nContext: a.\nWhy?\nA. x\nB. y", "A")])
    task = get_task("scienceqa", data=tmp_path)

    class Processor:
        image_token = "<image>"

    assert chat_prompt(Processor(), task.items[0].question) == (
        f"USER: <image>\nContext: a.\nWhy?\nA. x\nB. y\n{INSTRUCTION} ASSISTANT:"
    )


def test_scienceqa_own_folder(tmp_path: Path) -> None:
    entries = [
        science("1", "Without an image?\nA. x\nB. y", "A", image=None),
        science("2", "<image>\nWhich?\nA. x\nB. y", "B"),
        science("3", "A. is no choice here\nWhich?\nA. x\nB. y\nC. z\n<image>", "C"),
    ]
    write_json(tmp_path / "llava_test_CQM-A.json", entries)
    write_image(tmp_path / "images" / "3" / "image.png", (9, 8, 7))
    task = get_task("scienceqa", data=tmp_path)
    assert [item.id for item in task.items] == ["2", "3"]
    assert [item.kinds for item in task.items] == [("2 choices",), ("3 choices",)]
    assert task.items[0].question == f"Which?\nA. x\nB. y\n{INSTRUCTION}"
    assert task.open("3/image.png").getpixel((0, 0)) == (9, 8, 7)
    with pytest.raises(ValueError, match="there is no such file"):
        task.open("2/image.png")
    assert [item.id for item in get_task("scienceqa", data=tmp_path, present=True).items] == ["3"]
    assert [item.id for item in get_task("scienceqa", data=tmp_path, limit=1).items] == ["2"]


def test_scienceqa_limit_counts_present_images(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", [science(str(n), "?\nA. x\nB. y", "B") for n in range(9)])
    for n in (3, 5, 8):
        write_image(tmp_path / "images" / str(n) / "image.png")
    task = get_task("scienceqa", data=tmp_path, present=True, limit=2)
    assert [item.id for item in task.items] == ["3", "5"]


def test_scienceqa_images_as_the_download_has_them(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", [science("2", "?\nA. x\nB. y", "B")])
    write_image(tmp_path / "images" / "test" / "2" / "image.png")
    assert len(get_task("scienceqa", data=tmp_path, present=True).items) == 1
    assert get_task("scienceqa", data=tmp_path).open("2/image.png").size == (6, 4)


def test_scienceqa_no_image_present(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", [science("2", "?\nA. x\nB. y", "B")])
    with pytest.raises(ValueError, match="present=True, but no image"):
        get_task("scienceqa", data=tmp_path, present=True)
    with pytest.raises(ValueError, match="present must be one of True, False, got 'yes'"):
        get_task("scienceqa", data=tmp_path, present="yes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must be a list of questions"),
        ([], "no questions"),
        ([science("1", "?\nA. x\nB. y", "A", image=None)], "no questions"),
        ([3], "entry 1: expected a JSON object, got 3"),
        (
            [science("1", "?\nA. x\nB. y", "A"), science("1", "!\nA. x\nB. y", "B")],
            "entry 2: the id '1' occurs twice",
        ),
        ([science("1", "?\nA. x\nB. y", "C")], "entry 1: conversations must be .*one of their letters"),
        ([science("1", "no choices", "A")], "one of their letters"),
        ([science("1", "?\nA. x\nB. y", "")], "value must be .* got ''"),
        ([{"id": "1", "image": "a", "conversations": "x"}], "conversations must be two turns.* got 'x'"),
        ([{"id": "1", "image": "a", "conversations": [1, 2]}], "must be two turns"),
        ([{"id": "1", "image": "a"}], "conversations must be .* got nothing"),
        ([science("1", "?\nA. x\nB. y", "A", image="../../x.png")], "image must be .* got '../../x.png'"),
        ([science("1", "?\nA. x\nB. y", "A") | {"image": 7}], "image must be .* got 7"),
        ([science("1", "?\nA. x\nB. y", "A") | {"id": None}], "id must be .* got None"),
        ([science("1", "?\nA. x\nB. y", "A") | {"id": True}], "id must be .* got True"),
    ],
)
def test_scienceqa_bad_files(tmp_path: Path, content: Any, message: str) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", content)
    with pytest.raises(ValueError, match=message) as caught:
        get_task("scienceqa", data=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B\n", "B"),
        ("B. New Hampshire", "B"),
        ("E", "E"),
        ("The answer is B.", "B"),
        ("I think so. The answer is C. Yes.", "C"),
        ("The answer is Z.", "Z"),
        ("The answer is B, I think", "B"),
        ("D. The answer is B.", "D"),
        ("F. The answer is B.", "B"),
        ("The answer is B", None),
        ("The answer is A. The answer is B.", None),
        ("the answer is B.", None),
        ("The answer is b.", None),
        ("b", None),
        ("F", None),
        ("B.", None),
        ("B.New", None),
        ("B) New", None),
        ("B: New", None),
        ("AB", None),
        ("BC. x", None),
        ("(B)", None),
        ("A. ", None),
        ("", None),
        (". x", None),
        ("ABCDE", None),
        ("New Hampshire", None),
        ("A or B", None),
        ("\u0391", None),
    ],
)
def test_scienceqa_parse_rule(text: str, letter: str | None) -> None:
    assert chosen(text) == letter


def test_scienceqa_score(tmp_path: Path) -> None:
    write_json(tmp_path / "llava_test_CQM-A.json", [science("2", "?\nA. x\nB. y", "B")])
    task = get_task("scienceqa", data=tmp_path)
    assert [task.score(task.items[0], text) for text in ("B", "B. y", "A", "y", "")] == [1, 1, 0, 0, 0]
    assert not task.judged


class Rows:
    """As much of `datasets.Dataset` as is used; decoding an image is counted."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.decoded = 0

    def remove_columns(self, names: list[str]) -> "Rows":
        if any(name not in row for row in self.rows for name in names):
            raise ValueError(f"Column name {names} not in the dataset.\nMore lines.")
        return Rows([{key: value for key, value in row.items() if key not in names} for row in self.rows])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.decoded += any("image" in row for row in self.rows)
        return iter(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.decoded += 1
        return self.rows[number]


class FakeHub(ModuleType):
    """A `datasets` that knows one dataset, or fails."""

    def __init__(self, rows: Rows | Exception) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, name: str | None = None, *, split: str) -> Rows:
        self.asked.append((path, name, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def install(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception) -> FakeHub:
    hub = FakeHub(Rows(rows) if isinstance(rows, list) else rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def test_hub_mmvet(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGBA", (3, 2), (1, 2, 3, 255))
    row = {"question_id": "v1_0", "image": image, "question": "x?", "answer": "1<OR>2", "capability": "ocr,math"}
    second = row | {"question_id": "v1_1", "capability": "rec, gen", "image": None}
    hub = install(monkeypatch, [row, second])
    task = get_task("mmvet")
    assert hub.asked == [("lmms-lab/MMVet", None, "test")]
    assert isinstance(hub.rows, Rows)
    assert hub.rows.decoded == 0
    assert task.items == [
        Item("v1_0", "v1_0", "x?", "1<OR>2", ("ocr", "math")),
        Item("v1_1", "v1_1", "x?", "1<OR>2", ("rec", "gen")),
    ]
    opened = task.open("v1_0")
    assert (opened.mode, opened.getpixel((0, 0))) == ("RGB", (1, 2, 3))
    with pytest.raises(ValueError, match="image 'v1_1': its row in the dataset has none"):
        task.open("v1_1")
    with pytest.raises(ValueError, match="no such image"):
        task.open("v1_2")


def test_hub_scienceqa_says_the_same_as_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = Image.new("L", (3, 2), 7)
    rows = [
        {"image": image, "question": "Which?", "choices": ["x", "y"], "answer": 1, "hint": "Look.\nWell."},
        {"image": image, "question": "Why?", "choices": ["x", "y", "z"], "answer": 0, "hint": ""},
    ]
    hub = install(monkeypatch, rows)
    entries = [
        science("a", "<image>\nContext: Look.\nWell.\nWhich?\nA. x\nB. y", "B"),
        science("b", "<image>\nWhy?\nA. x\nB. y\nC. z", "A"),
    ]
    write_json(tmp_path / "llava_test_CQM-A.json", entries)
    task, file = get_task("scienceqa"), get_task("scienceqa", data=tmp_path)
    assert hub.asked == [("lmms-lab/ScienceQA", "ScienceQA-IMG", "test")]
    for item, same in zip(task.items, file.items, strict=True):
        assert (item.question, item.answer, item.kinds) == (same.question, same.answer, same.kinds)
    assert [item.id for item in task.items] == ["row-0000", "row-0001"]
    assert task.open("row-0001").getpixel((0, 0)) == (7, 7, 7)
    assert len(get_task("scienceqa", limit=1).items) == 1


def test_hub_other_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, ConnectionError("no route\nto the hub"))
    with pytest.raises(ValueError, match=r"hub 'me/vet' could not be loaded \(no route\): pass data=DIR") as caught:
        get_task("mmvet", hub="me/vet")
    assert "\n" not in str(caught.value)
    assert hub.asked == [("me/vet", None, "test")]
    write_json(tmp_path / "mm-vet.json", {"q": vet()})
    with pytest.raises(ValueError, match="pass either hub or data"):
        get_task("mmvet", data=tmp_path, hub="me/vet")


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("mmvet", {"question": "x"}, "could not be loaded"),
        (
            "mmvet",
            {"image": None, "question": "x", "answer": "y", "capability": "ocr"},
            "row 0: question_id must be .* got nothing",
        ),
        (
            "mmvet",
            {"image": None, "question_id": "a", "question": "x", "answer": "y", "capability": 3},
            "capability",
        ),
        ("scienceqa", {"image": None, "question": "x", "choices": ["a", "b"], "answer": 2}, "answer must be .* got 2"),
        (
            "scienceqa",
            {"image": None, "question": "x", "choices": ["a", "b"], "answer": True},
            "answer must .* True",
        ),
        ("scienceqa", {"image": None, "question": "x", "choices": list("abcdef"), "answer": 0}, "2 to 5"),
        (
            "scienceqa",
            {"image": None, "question": None, "choices": ["a", "b"], "answer": 0},
            "question must .* None",
        ),
    ],
)
def test_hub_other_columns(monkeypatch: pytest.MonkeyPatch, task: str, row: dict[str, Any], message: str) -> None:
    install(monkeypatch, [row])
    with pytest.raises(ValueError, match=message):
        get_task(task)


@pytest.mark.parametrize("task", ["mmvet", "scienceqa"])
def test_hub_without_the_library(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pass data=DIR \(--data DIR\).*https://github.com.*install `datasets`"):
        get_task(task)


def test_addresses_in_messages_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    addresses = [
        address for advice in (MMVET_ADVICE, SCIENCEQA_ADVICE) for address in re.findall(r"https://[^\s()]+", advice)
    ]
    assert len(addresses) == 3
    assert all(address in page for address in addresses)
