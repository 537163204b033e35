"""`samestep resume`: a run continued from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from samestep.checkpoint.store import CheckpointFolder
from samestep.cli.options import RunArgument, SetOption, option
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, plan_to_resume
from samestep.cli.training import TrainingOptions, run_training


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions, SetOption, RunArgument):
    """Resume a run from a checkpoint, on any number of processes, with the same result."""

    example: ClassVar = "samestep resume runs/first --processes 3"

    checkpoint: str = option(
        "best, last, epoch-N, or a step (default last)", "WHICH", default="last"
    )
    accept_changes: bool = option(
        "continue although the data or the user's Python modules have changed", default=False
    )


def run(options: Options) -> int:
    """Resume; return the exit codes of `train`."""
    overrides = [*options.strategy_overrides(), *options.overrides]

    def make_plan(restarts: int) -> RunPlan:
        is_new = not CheckpointFolder(options.folder / "checkpoints").steps()
        if (restarts or is_new) and options.checkpoint == "last":
            plan = plan_to_resume(options.folder, overrides, trust=options.trust)
        else:
            plan = plan_from_checkpoint(
                options.folder, options.checkpoint, overrides, trust=options.trust
            )
        accepts = options.accept_changes and not restarts
        return replace(plan, recipe=plan.recipe.with_microbatches(), accept_changes=accepts)

    return run_training(options, make_plan)
