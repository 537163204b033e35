"""`samestep resume`: a run continued from a checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from samestep.checkpoint.store import CheckpointFolder
from samestep.cli.new_run import TrainingOptions, add_training_options
from samestep.cli.options import add_options, add_run_argument
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, plan_to_resume
from samestep.cli.train import run_training


def add_resume(add_parser: Any) -> None:
    """Add `samestep resume`."""
    parser = add_parser(
        description="Resume a run from a checkpoint, on any number of processes, with the same result.",
        epilog="example: samestep resume runs/first --processes 3",
    )
    add_run_argument(parser, checkpoint="last")
    add_options(parser, "--set")
    text = "continue although the training data or the user's Python modules have changed since the run began"
    parser.add_argument("--accept-changes", action="store_true", help=text)
    add_training_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_resume)


def _resume(arguments: argparse.Namespace) -> int:
    """Resume; return the exit codes of `train`."""
    options = TrainingOptions.parse(arguments)

    def make_plan(restarts: int) -> RunPlan:
        is_new = not CheckpointFolder(arguments.folder / "checkpoints").steps()
        if (restarts or is_new) and arguments.checkpoint == "last":
            plan = plan_to_resume(arguments.folder, options.overrides, trust=arguments.trust)
        else:
            plan = plan_from_checkpoint(
                arguments.folder, arguments.checkpoint, options.overrides, trust=arguments.trust
            )
        accepts = arguments.accept_changes and not restarts
        return replace(plan, recipe=options.with_microbatches(plan.recipe), accept_changes=accepts)

    return run_training(options, make_plan)
