"""Options of the studies that run a grid of the evaluation."""

import argparse

from clustrs.studies.lists import read_counts, read_keeps

PAPER = "LLaVA-1.5-7B on MM-Vet"
"""What the paper's ablation and sensitivity were measured on."""


def add_grid_options(command: argparse.ArgumentParser, limit: int) -> None:
    """`limit` is how many questions about drawn scenes there are unless told otherwise."""
    command.add_argument("--task", default="scenes", help="scenes, mmvet, scienceqa or custom (default: scenes)")
    command.add_argument("--data", help="the folder (or file) of the task")
    command.add_argument("--set-task", metavar="KEY=VALUE", nargs="+", default=[], help="an option of the task")
    command.add_argument(
        "--limit", type=int, help=f"only the first so many questions (default: {limit} of scenes, all of other tasks)"
    )
    command.add_argument("--keep", nargs="+", default=["16", "50", "144"], help="budgets (default: 16 50 144)")
    command.add_argument("--seeds", nargs="+", default=["0"], help="of the corruptions (default: 0)")
    command.add_argument("--batch-size", type=int, default=24, help="questions answered together (default: 24)")
    command.add_argument("--judge-model", help="whose verdicts count, when a judge has to score the answers")
    command.set_defaults(usual_limit=limit)


def read_sizes(options: argparse.Namespace) -> tuple[list[int | float], list[int]]:
    """Budgets and seeds, given with spaces or commas between them."""
    return read_keeps(",".join(options.keep)), read_counts("--seeds", ",".join(options.seeds), low=0)
