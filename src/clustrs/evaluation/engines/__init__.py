"""Where a run's work is done: in this process, or over a Ray cluster."""
