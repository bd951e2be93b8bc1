"""`make count`: files that run are counted, files that are only imported are not."""

import sys
import threading
from pathlib import Path

import pytest

from tools import count


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "counted_one.py").write_text("def f(): return 1\nf()\n")
    (tmp_path / "counted_two.py").write_text("import counted_one\ndef g(): return 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(count, "SOURCES", (str(tmp_path),))
    return tmp_path


@pytest.mark.parametrize("in_thread", [False, True])
def test_files_run(package: Path, in_thread: bool) -> None:
    files: set[str] = set()
    for name in ("counted_one", "counted_two"):
        sys.modules.pop(name, None)
    with count.recording(files):
        import counted_two  # type: ignore[import-not-found]

        if in_thread:
            thread = threading.Thread(target=counted_two.g)
            thread.start()
            thread.join()
        else:
            counted_two.g()
    assert files == {str(package / "counted_two.py")}


def test_sizes_and_wording() -> None:
    sizes = count.source_sizes()
    assert sizes["src/clustrs/__init__.py"] == len(count.read_lines(count.ROOT / "src/clustrs/__init__.py"))
    prose, tables = count.docs_words()
    assert prose > tables > 1000
    assert count.WORDING.search('"""Whether a value is right."""')
    assert count.WORDING.search("keep=0: give a count")
    assert not count.WORDING.search("keep must be a count, got 0")
