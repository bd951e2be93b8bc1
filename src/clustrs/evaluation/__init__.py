"""Tasks, the runner, the judge, and what is made of their answers."""
