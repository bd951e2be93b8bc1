"""What is wrong with one image or question is one failure; what is wrong with a folder is one line."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from evaluation import run_files
from evaluation.run_files import answers, config, entry, errors, time_limit
from PIL import Image

from clustrs import register_task, run
from clustrs.corruptions import Corruption
from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.store import lines, read_answers, read_object
from clustrs.evaluation.tasks import Item
from clustrs.models import ask as shared_encoding
from clustrs.validation import open_regular, parse_json, read_text
from clustrs_paper.exchange import holds_grades, import_predictions

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_files.build(tmp_path_factory.mktemp("task"), images=3)


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of the task and the model that a test may change."""
    return shutil.copytree(original, tmp_path / "task")


@pytest.mark.parametrize("size", [(65500, 2), (2, 65500)])
def test_a_long_image_is_one_failure(root: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    """A file of some hundred bytes, for which the processor would ask for gigabytes."""
    Image.new("1", size).save(root / "1.png")
    assert (root / "1.png").stat().st_size < 20_000
    summary = run(config(root), tmp_path / "run", progress=False)
    assert (summary.answers, summary.failed) == (12, 4)
    assert set(errors(tmp_path / "run")) == {"1-0", "1-1"}
    assert all("at most 100 times as long as wide" in error for error in errors(tmp_path / "run").values())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("kind", ["FIFO", "device", "link to a FIFO"])
def test_what_is_not_a_regular_file_is_one_failure(root: Path, tmp_path: Path, kind: str) -> None:
    """Whoever opens a FIFO waits for a writer, and /dev/zero has no end: a counted failure, not a run that hangs."""
    (root / "1.png").unlink()
    if kind == "FIFO":
        os.mkfifo(root / "1.png")
    elif kind == "device":
        (root / "1.png").symlink_to("/dev/zero")
    else:
        os.mkfifo(root / "pipe")
        (root / "1.png").symlink_to(root / "pipe")
    with time_limit():
        summary = run(config(root), tmp_path / "run", progress=False)
    assert (summary.answers, summary.failed) == (12, 4)
    assert set(errors(tmp_path / "run")) == {"1-0", "1-1"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_no_file_of_a_run_may_be_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "answers.jsonl"
    os.mkfifo(pipe)
    readers: list[Callable[[], object]] = [
        lambda: read_object(pipe),
        lambda: list(lines(pipe)),
        lambda: list(read_answers(tmp_path)),
        lambda: import_predictions(pipe, "mmvet"),
        lambda: read_text(pipe),
    ]
    for read in readers:
        with time_limit(), pytest.raises(ValueError, match="not a regular file"):
            read()
    with time_limit():
        assert not holds_grades(pipe)
    with time_limit(), pytest.raises(OSError, match="not a regular file"):
        open_regular(os.devnull)


def test_a_key_twice_in_a_large_object_is_found_at_once() -> None:
    """And so is a seed; what compares each with all others would take hours."""
    pairs = [f'"{number}": 0' for number in range(500_000)]
    with time_limit(), pytest.raises(ValueError, match="the key '499999' occurs twice"):
        parse_json(f"{{{', '.join([*pairs, pairs[-1]])}}}", "file")
    seeds = (*range(300_000), 299_999)
    with time_limit(), pytest.raises(ValueError, match="duplicate value in seeds: 299999"):
        Config(task="custom", model="m", methods=expand_methods(["none"], []), seeds=seeds)


def test_one_bad_question_fails_alone(root: Path, tmp_path: Path) -> None:
    entries = [entry(0, 0), entry(0, 1, question="What is <image>?"), entry(0, 2), entry(1, 0)]
    run_files.write(root, entries)
    summary = run(config(root), tmp_path / "run", progress=False)
    assert (summary.answers, summary.failed) == (8, 2)
    assert set(errors(tmp_path / "run")) == {"0-1"}
    assert "<image>" in errors(tmp_path / "run")["0-1"]


def test_a_question_that_the_processor_refuses_fails_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = shared_encoding.encode

    def refusing(model: Any, processor: Any, images: Any, texts: Any, *others: Any) -> Any:
        if any("why not?" in text for _, text in texts):
            raise RuntimeError("not this one")
        return encode(model, processor, images, texts, *others)

    monkeypatch.setattr(shared_encoding, "encode", refusing)
    run(config(root), tmp_path / "run", progress=False)
    assert errors(tmp_path / "run") == {f"{number}-1": "not this one" for number in range(3)}


def test_a_template_that_fails_on_one_question(root: Path, tmp_path: Path) -> None:
    path = root / "model" / "chat_template.jinja"
    guard = "{% if 'why not' in messages[0].content[1].text %}{{ raise_exception('no\nsuch words') }}{% endif %}"
    path.write_text(guard + path.read_text())
    run(config(root), tmp_path / "run", progress=False)
    assert set(errors(tmp_path / "run")) == {f"{number}-1" for number in range(3)}
    assert all("no such words" in error for error in errors(tmp_path / "run").values())


def test_a_template_that_is_wrong_is_one_line_for_a_single_question_too(run: Run, root: Path) -> None:
    (root / "model" / "chat_template.jinja").write_text("{% if %}")
    code, out, err = run("ask", root / "0.png", "Why?", "--model", root / "model")
    assert (code, out) == (2, "")
    assert "the model's chat template failed: " in err
    assert err.count("\n") == 1


def test_memory_errors_of_a_corruption_are_one_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Corruption.apply

    def hungry(self: Corruption, image: Image.Image, image_id: str, seed: int = 0) -> Image.Image:
        if image_id == "1.png":
            raise MemoryError("Unable to allocate 12 GiB")
        return apply(self, image, image_id, seed)

    monkeypatch.setattr(Corruption, "apply", hungry)
    run(config(root, corruptions=("gaussian:0.5",)), tmp_path / "run", progress=False)
    assert errors(tmp_path / "run") == dict.fromkeys(("1-0", "1-1"), "Unable to allocate 12 GiB")


def test_an_image_that_alone_needs_too_much_memory_is_a_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = shared_encoding.encode

    def hungry(model: Any, processor: Any, images: Any, texts: Any, *others: Any) -> Any:
        if any(image.size == (77, 44) for image in images):
            raise MemoryError
        return encode(model, processor, images, texts, *others)

    tiny_models.make_image(44, 77).save(root / "1.png")
    monkeypatch.setattr(shared_encoding, "encode", hungry)
    run(config(root), tmp_path / "run", progress=False)
    assert errors(tmp_path / "run") == dict.fromkeys(("1-0", "1-1"), "MemoryError")


def test_a_batch_that_needs_too_much_memory_resumes_with_a_smaller_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = shared_encoding.reply

    def hungry(model: Any, processor: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if len(batch.input_ids) > 2:
            raise MemoryError("no more")
        return reply(model, processor, batch, *args, **options)

    monkeypatch.setattr(shared_encoding, "reply", hungry)
    with pytest.raises(ValueError, match="pass a smaller --batch-size, the run resumes with it"):
        run(config(root), tmp_path / "run", progress=False)
    assert run(config(root, batch_size=2), tmp_path / "run", progress=False).failed == 0
    monkeypatch.undo()
    run(config(root), tmp_path / "other", progress=False)
    assert answers(tmp_path / "run") == answers(tmp_path / "other")


def test_links_that_leave_the_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    shutil.move(root / "1.png", tmp_path / "secret" / "1.png")
    (root / "1.png").symlink_to(tmp_path / "secret" / "1.png")
    shutil.move(root / "2.png", root / "elsewhere.png")
    (root / "2.png").symlink_to("elsewhere.png")
    run(config(root), tmp_path / "run", progress=False)
    assert set(errors(tmp_path / "run")) == {"1-0", "1-1"}
    assert all("a link that leads out of the task's folder" in error for error in errors(tmp_path / "run").values())


def test_a_folder_that_is_a_link_itself(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert run(config(root, data=str(tmp_path / "link")), tmp_path / "run", progress=False).failed == 0


def full(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json.partial").symlink_to("/dev/full")
    return folder


def file(folder: Path) -> Path:
    folder.write_text("not a folder")
    return folder


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (full, "cannot be written: No space left on device"),
        (file, "cannot be written: File exists"),
        (lambda folder: file(folder) / "below", "cannot be written: Not a directory"),
        (lambda folder: folder / ("x" * 300), "cannot be written: File name too long"),
        (lambda folder: Path("/proc/clustrs-run"), "cannot be written: "),
        (lambda folder: folder / "\ud800", "characters that are not text"),
    ],
)
def test_folders_that_cannot_be_written(
    original: Path, tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(config(original), make(tmp_path / "run"), progress=False)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_disk_that_fills_up_during_a_run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fsync = os.fsync

    def filling(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:  # after config.json, images.json and the first answers
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", filling)
    with pytest.raises(ValueError, match="cannot be written: No space left on device"):
        run(config(original), tmp_path / "run", progress=False)
    monkeypatch.undo()
    summary = run(config(original), tmp_path / "run", progress=False)
    assert (summary.answers, summary.failed) == (12, 0)
    assert summary.reused == 7
    run(config(original), tmp_path / "other", progress=False)
    assert answers(tmp_path / "run") == answers(tmp_path / "other")


def test_the_command_says_it_in_one_line(run: Run, original: Path, tmp_path: Path) -> None:
    words = ("eval", "--task", "custom", "--data", original, "--model", original / "model", "--quiet", "-o")
    code, out, err = run(*words, file(tmp_path / "file"))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"clustrs: --output must be a folder that can be written to, got '{tmp_path / 'file'}' ")
    assert "is not a folder" in line


class Strange:
    """A task of somebody else's, with whatever its maker put into it."""

    name = "strange"
    max_new_tokens = 2
    judged = False
    scale = 100.0

    def __init__(self, *items: Item) -> None:
        self.items: Sequence[Item] = items

    def open(self, image: str) -> Image.Image:
        if image == "raises":
            raise KeyError("a bug of the task's")
        if image == "long":
            return Image.new("RGB", (65500, 2))
        return tiny_models.make_image()

    def score(self, item: Item, text: str) -> float | None:
        return 1 // (item.answer != "raises")


@pytest.fixture
def strange(original: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """A configuration of a task with these items."""
    monkeypatch.setattr("clustrs.evaluation.tasks._registered", {})

    def make(*items: Item) -> Config:
        register_task("strange")(lambda data, limit: Strange(*items))
        return Config(task="strange", model=str(original / "model"), methods=expand_methods(["clustrs"], [4]))

    return make


def test_another_tasks_bugs_are_failures(strange: Callable[..., Config], tmp_path: Path) -> None:
    items = [Item("a", "raises", "Why?", "x"), Item("b", "long", "Why?", "x"), Item("c", "good", "Why?", "raises")]
    summary = run(strange(*items, Item("d", "good", "Why?", "x")), tmp_path, progress=False)
    assert (summary.answers, summary.failed) == (4, 3)
    reasons = errors(tmp_path)
    assert "a bug of the task's" in reasons["a"]
    assert "too long, 65500 x 2" in reasons["b"]
    assert "the task's score failed" in reasons["c"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Item("a", "x", "Why \ud800?", "x")], r"the question 'Why \\ud800\?' of a question is not text"),
        ([Item("\ud800", "x", "Why?", "x")], "the id "),
        ([Item("a", "\udcff", "Why?", "x")], "the image "),
        ([Item("a", "x", "Why?", "x", ("\ud800",))], "the kind "),
        ([Item("a", "x", "Why?", "x"), Item("a", "x", "Why?", "x")], "two questions have the id 'a'"),
        ([], "there are no questions"),
    ],
)
def test_another_tasks_bad_questions(
    strange: Callable[..., Config], tmp_path: Path, items: list[Item], message: str
) -> None:
    with pytest.raises(ValueError, match=f"task strange: .*{message}"):
        run(strange(*items), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_answers_with_half_characters(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = shared_encoding.reply

    def broken(*args: Any, **options: Any) -> Any:
        return [shared_encoding.Reply("half \ud800", one.image) for one in reply(*args, **options)]

    monkeypatch.setattr(shared_encoding, "reply", broken)
    run(config(original), tmp_path, progress=False)
    assert {record.text for record in read_answers(tmp_path)} == {"half \\ud800"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_paths_that_are_not_text(original: Path, tmp_path: Path) -> None:
    data = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(original, data)
    summary = run(config(original, data=str(data)), tmp_path / "run", progress=False)
    assert (summary.answers, summary.failed) == (12, 0)
    assert run(config(original, data=str(data)), tmp_path / "run", progress=False).reused == 12
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == str(data)


LONG = "x" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "--config", LONG),
        ("eval", "--limit", "1", "--model", LONG),
        ("eval", "--limit", "1", "--model", f"/{LONG}"),
        ("eval", "--limit", "1", "--model", "~nobody-of-that-name/x"),
        ("eval", "--task", LONG),
        ("eval", "--task", "custom", "--data", LONG),
        ("eval", "--limit", "1", "-o", LONG),
        ("eval", "--limit", "9" * 400),
        ("eval", "--seeds", "9" * 400),
        ("report", LONG),
        ("ask", LONG, "Why?"),
    ],
    ids=lambda words: " ".join(words)[:32],
)
def test_names_and_numbers_that_are_too_long(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("clustrs: ")
    assert "Traceback" not in err
