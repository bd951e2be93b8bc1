"""The tasks, one file each."""

from clustrs.evaluation.checksums import fingerprint
from clustrs.evaluation.tasks.registry import check_task, get_task, list_tasks, register_task

__all__ = ["check_task", "fingerprint", "get_task", "list_tasks", "register_task"]
