"""One unit after another, in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clustrs.evaluation.config import Config
from clustrs.evaluation.records import AnswerRecord
from clustrs.evaluation.worker import Unit, Worker


@dataclass(frozen=True)
class LocalEngine:
    """Loads the model once and runs the units in their order."""

    def run(self, config: Config, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        """The records of each method of each unit."""
        if units:
            worker = Worker(config)
            for unit in units:
                yield from worker.run(unit)
