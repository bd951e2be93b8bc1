"""Questions on which two methods disagree, with drawings of what each kept, stored beside the run."""

from pathlib import Path

import msgspec

from clustrs.evaluation.report.blocks import Example

FILE = "examples.json"


def read_examples(folder: Path) -> tuple[Example, ...]:
    """Read the examples that were drawn for a run; none where none were."""
    path = Path(folder) / FILE
    if not path.exists():
        return ()
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Example, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r}: {str(error) or 'nested too deeply'}: draw them again, or remove it") from None


def encode_examples(examples: tuple[Example, ...]) -> str:
    return msgspec.json.encode(examples).decode() + "\n"
