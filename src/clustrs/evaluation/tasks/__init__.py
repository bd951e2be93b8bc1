"""The tasks, one file each."""

from clustrs.evaluation.checksums import fingerprint
from clustrs.evaluation.tasks.registry import get_task, list_tasks, register_task

__all__ = ["fingerprint", "get_task", "list_tasks", "register_task"]
