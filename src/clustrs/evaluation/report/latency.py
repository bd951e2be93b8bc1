"""Times of single answers, measured after a run with its model, and stored beside it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

FILE = "latency.json"
PARTS = ("vision", "selection", "prefill", "decode")


@dataclass(frozen=True)
class Latency:
    """Medians in milliseconds of each method (as its configuration has it), over so many answers, on a machine."""

    machine: str
    repeats: int
    milliseconds: tuple[tuple[Mapping[str, Any], Mapping[str, float]], ...]

    def to_json(self) -> str:
        return json.dumps({"machine": self.machine, "repeats": self.repeats, "milliseconds": self.milliseconds}) + "\n"


def read_latency(folder: Path) -> Latency | None:
    """Read what was measured for a run; None where nothing was."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Latency)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r}: {str(error) or 'nested too deeply'}: measure it again, or remove it"
        ) from None
