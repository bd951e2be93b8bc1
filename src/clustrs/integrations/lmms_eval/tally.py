"""How many visual tokens the questions of each task had, for the result file."""

from typing import Any

from clustrs.integrations.lmms_eval.engine import VisualCount


class Tally:
    """Sums over the questions of each task."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, task: str, visual: VisualCount) -> None:
        """Count a question."""
        sums = self._sums.setdefault(task, [0, 0, 0])
        for i, value in enumerate((1, visual.unpruned, visual.kept)):
            sums[i] += value

    def to_json(self) -> dict[str, Any]:
        """The means per question, by task."""
        return {
            task: {"questions": count, "unpruned_tokens": unpruned / count, "visual_tokens": kept / count}
            for task, (count, unpruned, kept) in self._sums.items()
        }
