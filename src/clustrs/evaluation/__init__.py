"""Evaluation: tasks, resumable runs, judges, metrics and reports; `clustrs` has the public names."""
