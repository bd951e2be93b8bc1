"""Files of JSON lines that a killed process left half done."""

from pathlib import Path

import pytest

from clustrs.evaluation.store import BLOCK, drop_torn_line, lines, raw_lines


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * BLOCK, b"x" * (BLOCK - 1), b"x" * (3 * BLOCK + 7)])
@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": 1}\n' * 20_000], ids=len)
def test_a_torn_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(whole + torn)
    assert [line for _, line in raw_lines(path)] == whole.splitlines(keepends=True)
    with path.open("r+b") as file:
        drop_torn_line(file)
        assert file.tell() == len(whole)
        file.write(b"{}\n")
    assert path.read_bytes() == whole + b"{}\n"


def test_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl' line 2: expected an object, got \[2\]"):
        list(lines(path))
