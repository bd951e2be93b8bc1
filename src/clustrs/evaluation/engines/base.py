"""What an engine is."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from clustrs.evaluation.config import Config
from clustrs.evaluation.records import AnswerRecord
from clustrs.evaluation.worker import Unit


class Engine(Protocol):
    """Does the work of a run."""

    def run(self, config: Config, units: Sequence[Unit]) -> Iterable[list[AnswerRecord]]:
        """The records of all units, in any order, as they come. Nothing is loaded when there are no units."""
        ...
