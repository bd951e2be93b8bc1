"""Questions of one's own: the format, the ways of scoring, and a line number for every mistake."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from evaluation.task_files import INSTRUCTION, line, write_image, write_lines

from clustrs.evaluation.tasks import get_task
from clustrs.evaluation.tasks.custom import occurs, plain


def test_file_and_folder(tmp_path: Path) -> None:
    write_image(tmp_path / "pics" / "a.png", (4, 5, 6))
    path = write_lines(
        tmp_path / "questions.jsonl",
        line(image="pics/a.png", id=7, kind="animal"),
        line(image="pics/a.png", id="eight", kinds=["animal", "indoor", "animal"], extra="ignored"),
        line(image="pics/a.png", kinds=[], answer=["a cat", "a kitten"]),
    )
    task = get_task("custom", data=path)
    assert task.items == get_task("custom", data=tmp_path).items
    assert [item.id for item in task.items] == ["7", "eight", "line-3"]
    assert [item.kinds for item in task.items] == [("animal",), ("animal", "indoor"), ()]
    assert [item.answer for item in task.items] == ["a cat", "a cat", "a cat<OR>a kitten"]
    assert task.items[0].question == "What is it?"
    assert task.open("pics/a.png").getpixel((0, 0)) == (4, 5, 6)
    assert len(get_task("custom", data=path, limit=2).items) == 2


def test_line_ends_blank_lines_and_marks(tmp_path: Path) -> None:
    rows = [json.dumps(line(question=f"q{n}\u2028?"), ensure_ascii=False) for n in range(3)]
    text = "\ufeff" + "\r\n\r\n".join(rows)
    (tmp_path / "questions.jsonl").write_bytes(text.encode())
    task = get_task("custom", data=tmp_path)
    assert [(item.id, item.question) for item in task.items] == [
        ("line-1", "q0\u2028?"),
        ("line-3", "q1\u2028?"),
        ("line-5", "q2\u2028?"),
    ]


def test_exact(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", line(answer=["A cat", "Caf\u00e9!"]))
    task = get_task("custom", data=tmp_path)
    for text, score in [
        ("a cat", 1),
        (" A  CAT.\n", 1),
        ("A cat?!", 1),
        ("cafe\u0301", 1),
        ("cat", 0),
        ("the cat", 0),
        ("a cat sits", 0),
        ("'a cat'", 0),
        ("cafe", 0),
        ("", 0),
    ]:
        assert task.score(task.items[0], text) == score, text
    assert not task.judged


def test_punctuation_alone_is_kept() -> None:
    assert plain("?!") == "?!"
    assert plain("?") != plain("!")


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        ("cat", "A Cat, perhaps.", True),
        ("cat", "category", False),
        ("cat", "tomcat", False),
        ("cat", "cat_food", False),
        ("red car", "It is a red\n car.", True),
        ("red car", "red sports car", False),
        ("5", "there are 5.", True),
        ("5", "5", True),
        ("5", "15", False),
        ("5", "1.5", False),
        ("5", "5.2", False),
        ("5", "1,500", False),
        ("5", "-5", False),
        ("5", "x = -5", False),
        ("5", "(\u22125)", False),
        ("5", "3-5", True),
        ("5", "1, 5, 7", True),
        ("-5", "x = -5.", True),
        ("-5", "3-5", False),
        ("1.25", "1.25 m", True),
        ("50%", "about 50%.", True),
        ("C++", "in C++ or C", True),
        (".*", "anything", False),
        ("(a", "anything (a", True),
        ("stra\u00dfe", "STRASSE", True),
        ("x", "", False),
    ],
)
def test_contains(answer: str, text: str, found: bool) -> None:
    assert occurs(answer, text) is found


def test_contains_any_of_several(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", line(answer=["cat", "kitten"]))
    task = get_task("custom", data=tmp_path, scoring="contains")
    scores = [task.score(task.items[0], text) for text in ("My kitten", "a cat", "a dog", "cats")]
    assert scores == [1, 1, 0, 0]


def test_choice(tmp_path: Path) -> None:
    choices = ["a cat", "a dog", "B"]
    write_lines(
        tmp_path / "questions.jsonl",
        line(choices=choices, answer="a dog", kind="animal"),
        line(choices=choices, answer="A"),
    )
    task = get_task("custom", data=tmp_path, scoring="choice")
    item = task.items[0]
    assert item.question == f"What is it?\nA. a cat\nB. a dog\nC. B\n{INSTRUCTION}"
    assert [item.answer for item in task.items] == ["B", "A"]
    assert item.kinds == ("animal",)
    texts = ["B", "B. a dog", "The answer is B.", "A", "a dog", "D. The answer is B.", ""]
    assert [task.score(item, text) for text in texts] == [1, 1, 1, 0, 0, 0, 0]


def test_many_choices(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", line(choices=[f"c{n}" for n in range(26)], answer="c25"))
    task = get_task("custom", data=tmp_path, scoring="choice")
    assert task.items[0].answer == "Z"
    assert task.items[0].question.endswith(f"\nZ. c25\n{INSTRUCTION}")
    assert [task.score(task.items[0], text) for text in ("Z", "Z. c25", "Y")] == [1, 1, 0]


def test_judged(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", line(answer=["a", "b"]))
    task = get_task("custom", data=tmp_path, scoring="judged")
    assert task.judged
    assert task.score(task.items[0], "a") is None
    assert task.items[0].answer == "a<OR>b"


@pytest.mark.parametrize(
    ("scoring", "bad", "message"),
    [
        ("exact", "{", "not JSON"),
        ("exact", "[1]", "expected a JSON object"),
        ("exact", "null", "expected a JSON object"),
        ("exact", '{"image": "a", "image": "b"}', "the key 'image' occurs twice"),
        ("exact", "[" * 100_000, "nested too deeply|not JSON"),
        ("exact", line(image=...), "image must be .* got nothing"),
        ("exact", line(image="/a.png"), "image must be a path inside the folder.* got '/a.png'"),
        ("exact", line(image="b/../../a.png"), "image must be "),
        ("exact", line(image=["a.png"]), r"image must be .* got \['a.png'\]"),
        ("exact", line(question=""), "question must be .* got ''"),
        ("exact", line(question=None), "question must be .* got None"),
        ("exact", line(answer=...), "answer must be .* got nothing"),
        ("exact", line(answer=5), "answer must be a string.* got 5"),
        ("exact", line(answer=[]), r"answer must be .* got \[\]"),
        ("exact", line(answer=["a", ""]), "answer must be "),
        ("exact", line(id="first"), "the id 'first' occurs twice"),
        ("exact", line(id=1.5), "id must be .* got 1.5"),
        ("exact", line(kind=3), "kind must be .* got 3"),
        ("exact", line(kinds="a"), "kinds must be .* got 'a'"),
        ("exact", line(kind="a", kinds=["b"]), "kind must be absent where there are kinds"),
        ("exact", line(choices=["a", "b"]), "scoring='choice'"),
        ("choice", line(), "choices must be .* got nothing"),
        ("choice", line(choices=["a cat"]), "2 to 26"),
        ("choice", line(choices=[str(n) for n in range(27)]), "2 to 26"),
        ("choice", line(choices="AB"), "choices must be .* got 'AB'"),
        ("choice", line(choices=["x", "y"]), "answer must be one letter of AB.* got 'a cat'"),
        ("choice", line(choices=["x", "y"], answer="C"), "answer must be .* got 'C'"),
        ("choice", line(choices=["x", "A"], answer="A"), "answer must be .* got 'A'"),
        ("choice", line(choices=["x", "x"], answer="x"), "answer must be .* got 'x'"),
        ("choice", line(choices=["x", "y"], answer=["x"]), "answer must be "),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, scoring: str, bad: Any, message: str) -> None:
    first = line(id="first", **({"choices": ["a cat", "b"]} if scoring == "choice" else {}))
    text = bad if isinstance(bad, str) else json.dumps(bad)
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(first)}\n\n{text}\n")
    with pytest.raises(ValueError, match=message) as caught:
        get_task("custom", data=path, scoring=scoring)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_empty_files(tmp_path: Path, content: str) -> None:
    (tmp_path / "questions.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"questions\.jsonl has no questions"):
        get_task("custom", data=tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data must be a file of JSON lines"):
        get_task("custom")
    with pytest.raises(ValueError, match=r"there is no file questions\.jsonl"):
        get_task("custom", data=tmp_path)
    with pytest.raises(ValueError, match=r"there is no file x\.jsonl"):
        get_task("custom", data=tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"scoring must be one of .*, got 'exakt' .did you mean 'exact'"):
        get_task("custom", data=tmp_path, scoring="exakt")


def test_tasks_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    write_lines(tmp_path / "questions.jsonl", line())
    task = get_task("custom", data=tmp_path)
    sent = pickle.loads(pickle.dumps(task))  # noqa: S301
    assert sent.items == task.items
    assert sent.open("a.png") == task.open("a.png")
