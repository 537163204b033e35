"""Training that `samestep train` and `resume` share: options, launch, summary."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.cli.external_launcher import run_as_rank
from samestep.cli.launch_options import FaultOptions, LoaderOptions, requeue_after, slurm_restarts
from samestep.cli.options import JsonOption, count, names, option, options_of
from samestep.cli.recipe_options import StrategyOptions
from samestep.cli.run_plans import RunPlan
from samestep.config import DEFAULT_CHECKSUM_EVERY, DEFAULT_KEEP, LOGGERS, RunOptions
from samestep.distributed.disk_operations import HeldFolder
from samestep.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, NonFiniteError
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.launcher.launch import LaunchConfig, LaunchResult
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import tensorboard_command
from samestep.recipes.recipe_files import make_recipe, with_saved_weight
from samestep.units import parse_duration, plural


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints of a run."""

    group: ClassVar = "checkpoints"

    checkpoint_every: int | None = option(
        "steps between checkpoints within epochs (default: none)", "STEPS"
    )
    max_lost_work: float | None = option(
        "limit of the work that a kill can cost, such as 5m",
        "TIME",
        type=partial(parse_duration, "--max-lost-work"),
    )
    keep: int | None = option(
        f"newest checkpoints to keep (default {DEFAULT_KEEP}, or as before)", "K"
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Checks and loggers of a run."""

    group: ClassVar = "checks and logging (results do not depend on these options)"

    checksum_every: int = option(
        f"steps between checksums of the state (default {DEFAULT_CHECKSUM_EVERY}; 0: none)",
        "STEPS",
        default=DEFAULT_CHECKSUM_EVERY,
        type=count,
    )
    loggers: tuple[str, ...] = option(
        f"loggers of metrics and events: {', '.join(LOGGERS)} (default {','.join(RunOptions.loggers)})",
        "NAME,...",
        default=RunOptions.loggers,
        type=names,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    JsonOption, FaultOptions, CheckOptions, CheckpointOptions, StrategyOptions, LoaderOptions
):
    """Options that `train` and `resume` share."""

    default_size: ClassVar = "auto"

    requeue: bool = option(
        "under Slurm: requeue the job after a stop by SIGUSR1 (sbatch --signal)", default=False
    )

    @property
    def run(self) -> RunOptions:
        """Options of the run; with `--json`, only the summary is printed."""
        return options_of(RunOptions, self, quiet=self.json)

    def rank_arguments(self, plan: RunPlan) -> tuple[Any, ...]:
        """Return the arguments of the function `train` of the ranks."""
        return plan.recipe, self.run, plan.folder, plan.checkpoint, plan.step, plan.accept_changes


@dataclass(frozen=True)
class TrainedRun:
    """Result of a training.

    Attributes:
        summary: other values that `recipes.run.train` returns.
        folder: directory of the run.
        stop_signal: signal that requested the end, if any.
        has_failed: whether most steps were skipped.
    """

    summary: dict[str, Any]
    folder: Path
    stop_signal: int | None
    has_failed: bool

    def require_finite_steps(self) -> None:
        """Raise a `NonFiniteError` if most steps were skipped."""
        if self.has_failed and not self.summary["stopped"]:
            fix = "lower the learning rate, or find the first such step with step.non_finite=stop, in a new run"
            skipped = _skipped_steps(self.summary)
            raise NonFiniteError(f"the run skipped {skipped}", "most steps update the weights", fix)


def trained_run(options: TrainingOptions, make_plan: Callable[[int], RunPlan]) -> TrainedRun:
    """Train with the plan for a number of restarts by a launcher or by Slurm; under a launcher, as one of its ranks."""
    stop_signal: int | None = None
    if options.rendezvous is None:
        plan = make_plan(slurm_restarts(options.requeue))
        result = _launch(options, plan)
        summary = result.value
        stop_signal = result.stop_signal
    else:
        plan, summary = run_as_rank(
            options, options.rendezvous, "train", make_plan, options.rank_arguments
        )
    own_signal = summary.pop("stop_signal")
    has_failed = summary.pop("has_failed")
    return TrainedRun(summary, plan.folder, stop_signal or own_signal, has_failed)


def run_training(options: TrainingOptions, make_plan: Callable[[int], RunPlan]) -> int:
    """Train as `trained_run`, print the summary, requeue the Slurm job if requested, and return the exit code."""
    run = trained_run(options, make_plan)
    is_stopped = run.summary["stopped"]
    if options.rendezvous is not None and options.rendezvous.rank > 0:
        if is_stopped:
            # srun --kill-on-bad-exit would end rank 0 before its request to requeue the job.
            if options.requeue:
                return EXIT_DONE
            return EXIT_STOPPED
        if run.has_failed:
            return EXIT_FAILED
        return EXIT_DONE
    options.result(
        {**run.summary, "run": str(run.folder)}, *_summary_lines(run.summary, run.folder)
    )
    if is_stopped:
        if options.requeue:
            requeue_after(run.stop_signal)
        return EXIT_STOPPED
    run.require_finite_steps()
    return EXIT_DONE


def _launch(options: TrainingOptions, plan: RunPlan) -> LaunchResult:
    folder = plan.folder
    first_step = plan.step
    held = HeldFolder(folder)
    processes = options.process_range(plan.recipe)

    def attempt(count: int, config: LaunchConfig) -> LaunchResult:
        return options.launch(
            "train", *options.rank_arguments(plan), processes=count, config=config
        )

    def newest_step() -> int:
        nonlocal plan
        held.require_in_place()
        checkpoint = CheckpointFolder(folder / "checkpoints").newest_valid()
        recipe = plan.recipe
        if checkpoint is not None:
            saved = make_recipe(read_state(checkpoint).progress.recipe, (), origin=str(checkpoint))
            recipe = with_saved_weight(recipe, saved)
        plan = RunPlan(recipe, folder, checkpoint, _step_of(checkpoint) if checkpoint else 0)
        return plan.step

    try:
        return options.launch_with_restarts(
            processes,
            attempt,
            log_dir=folder / "logs",
            first_step=first_step,
            newest_step=newest_step,
        )
    except RankError as error:
        if error.failure.code == E_DISK_HANG:  # to read the folder could take without end
            raise
        steps = CheckpointFolder(folder / "checkpoints").steps()
        hint = f"after the fix, resume with: {_command('resume', folder)}" if steps else ""
        raise error.with_next_step(hint) from None


def _command(name: str, folder: Path) -> str:
    return shlex.join(["samestep", name, str(folder)])


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("step-")[2])  # also `.replaced-step-N`


def _skipped_steps(summary: dict[str, Any]) -> str:
    return f"{summary['skipped_steps']} of {plural(summary['step'], 'step')}, because loss or gradient was not finite"


def _summary_lines(summary: dict[str, Any], folder: Path) -> list[str]:
    evaluation = summary["evaluation"]
    values = {name: value for name, value in evaluation.items() if name not in ("loss", "samples")}
    lines = [(name, format_metric(name, value)) for name, value in values.items()]
    if evaluation:
        lines.append(("evaluated", f"{evaluation['samples']:,} samples"))
    if summary["samples_per_second"]:
        lines.append(
            (
                "speed",
                f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s in all",
            )
        )
    if summary["skipped_steps"]:
        lines.append(("skipped", _skipped_steps(summary)))
    lines.append(("run", str(folder)))
    if summary["stopped"]:
        lines.append(
            ("stopped", f"after step {summary['step']}; resume with: {_command('resume', folder)}")
        )
    else:
        if (folder / "tensorboard").exists():
            lines.append(("curves", tensorboard_command(folder / "tensorboard")))
        lines.append(("evaluate", _command("eval", folder)))
    width = max(12, *(len(name) + 2 for name, _ in lines))
    return [f"{name:<{width}}{text}" for name, text in lines]
