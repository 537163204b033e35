"""`samestep train`, `samestep resume` and `samestep run`: recipes and user scripts on any number of processes."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import HeldFolder
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.cli.external_launcher import require_single_process, run_as_rank
from samestep.cli.launch_options import (
    LaunchOptions,
    add_fault_options,
    add_hosts_options,
    launch_ranks,
    launch_with_restarts,
    requeue_after,
    slurm_restarts,
)
from samestep.cli.new_run import NewRun, TrainingOptions
from samestep.cli.options import (
    add_machine_options,
    add_options,
    add_recipe_argument,
    add_run_argument,
    option_conflict,
    output_folder,
    print_json,
    require_file,
    timed_name,
)
from samestep.cli.recipe_options import add_strategy_options
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, plan_to_resume
from samestep.config import DEFAULT_CHECKSUM_EVERY, DEFAULT_KEEP, LOGGERS, RunOptions, resolve_mesh
from samestep.distributed.logging import logger
from samestep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    InputError,
    NonFiniteError,
    RunError,
    SamestepError,
    WitnessError,
)
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.launcher.host_arrival import join_hosts
from samestep.launcher.hosts import HostsConfig
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import tensorboard_command
from samestep.recipes.recipe_files import make_saved_recipe, with_saved_weight
from samestep.units import parse_duration, plural


def add_train(add_parser: Any) -> None:
    """Add `samestep train`."""
    parser = add_parser(
        description="Train a recipe on any number of processes, with the same result.",
        epilog="example: samestep train digits --processes 2 --set epochs=5 --name first",
    )
    add_recipe_argument(parser)
    add_options(parser, "--per-device-batch-size", "--accumulate")
    _add_training_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--name", help="name of the run (default: recipe, date and time)")
    group.add_argument("--or-resume", action="store_true", help="resume the run of this --name if it exists")
    add_options(group, "--runs")
    add_options(parser, "--json")
    parser.set_defaults(run=_train_recipe)


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
    _add_training_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_resume)


def add_run(add_parser: Any) -> None:
    """Add `samestep run`."""
    parser = add_parser(
        description="Run a script on several processes of this machine: a script with samestep.start(), or one written "
        "for torchrun, whose variables are set. The output of ranks other than 0 is written to files.",
        epilog="example: samestep run --processes 2 train.py --epochs 3",
    )
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    group = parser.add_argument_group("machine")
    text = "number of ranks; auto: one per GPU, or one per core on a machine without GPUs; or MIN:MAX (default auto)"
    group.add_argument("--processes", default="auto", metavar="N", help=text)
    add_options(group, "--devices", "--share-gpu")
    add_hosts_options(parser)
    add_fault_options(parser)
    add_options(parser.add_argument_group("output"), "--runs")
    parser.set_defaults(run=_run_script)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    add_machine_options(parser)
    add_hosts_options(parser)
    text = "ignore the settings that samestep tune found here; --workers and --prefetch ignore them too"
    parser.add_argument("--no-tuned", action="store_true", help=text)
    add_strategy_options(parser)
    group = parser.add_argument_group("checkpoints")
    text = "steps between checkpoints within epochs (default: none)"
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS", help=text)
    text = "limit of the work that a kill can cost, such as 30s, 5m, 1h"
    group.add_argument("--max-lost-work", type=partial(parse_duration, "--max-lost-work"), metavar="TIME", help=text)
    text = f"newest checkpoints to keep (default {DEFAULT_KEEP}; for a resumed run, that of its last start)"
    group.add_argument("--keep", type=int, metavar="K", help=text)
    group = parser.add_argument_group("checks (results do not depend on these options)")
    text = "steps between comparisons of the ranks' weights; also checks every collective"
    group.add_argument("--check-every", type=int, metavar="STEPS", help=text)
    text = f"steps between logged checksums of the state; 0 for none (default {DEFAULT_CHECKSUM_EVERY})"
    group.add_argument("--checksum-every", type=int, metavar="STEPS", help=text)
    text = "steps between steps in which a second rank repeats a microbatch of each rank and compares the bits"
    group.add_argument("--witness-every", type=int, metavar="STEPS", help=text)
    group = parser.add_argument_group("logging (results do not depend on this option)")
    group.add_argument(
        "--loggers",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=",".join(RunOptions.loggers),
        metavar="NAME,...",
        help=f"loggers of metrics and events: {', '.join(LOGGERS)} (default {','.join(RunOptions.loggers)})",
    )
    add_fault_options(parser, requeue=True)


def _train_recipe(arguments: argparse.Namespace) -> int:
    """Train; return 0 after all epochs, 130 after a request to stop."""
    options = TrainingOptions.parse(arguments, Path(arguments.recipe).stem)
    if arguments.or_resume and not arguments.name:
        raise option_conflict("--or-resume without --name", "the name of the run", "--name NAME")
    batch = (arguments.per_device_batch_size, arguments.accumulate)
    new_run = NewRun(arguments.recipe, arguments.name, arguments.runs, *batch, or_resume=arguments.or_resume)
    try:
        return _train(options, partial(new_run.plan, options))
    except KeyboardInterrupt:
        new_run.remove_without_checkpoint()
        raise
    except SamestepError as error:
        if error.exit_code in (InputError.exit_code, EXIT_STOPPED) or error.code == "E_OUTPUT":
            new_run.remove_without_checkpoint()
        raise


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

    return _train(options, make_plan)


def _run_script(arguments: argparse.Namespace) -> int:
    """Run the script; return 0 if every rank succeeded, 130 after a request to stop."""
    require_single_process("run")
    script: Path = arguments.script
    require_file(script)
    _note_options_after_script(arguments)
    options = LaunchOptions.parse(arguments)
    log_dir = arguments.runs / timed_name(arguments.runs, script.stem) / "logs"
    processes = options.process_range()
    call = partial(ByName("samestep.launcher.worker", "run_script"), script, tuple(arguments.arguments))
    if options.hosts is not None:
        return _run_script_on_hosts(options, options.hosts, call, log_dir)
    starts = itertools.count()

    def attempt(count: int, launch_config: LaunchConfig) -> LaunchResult:
        restarts = (next(starts), options.max_restarts)
        return run_workers(
            call, *restarts, processes=count, launch_config=launch_config, environment=options.environment
        )

    # Rank 0 writes to the terminal.
    with output_folder(log_dir, script.stem, "--runs") if processes[1] > 1 else nullcontext():
        result = launch_with_restarts(options, processes, attempt, log_dir=log_dir)
    return EXIT_STOPPED if result.stop_signal is not None else EXIT_DONE


def _note_options_after_script(arguments: argparse.Namespace) -> None:
    """Print a note if the script receives options of `samestep run`, which can be meant for this command."""
    # Options, each with the space before its value if there is one.
    options = dict(re.findall(r"\[(--[\w-]+)( ?)", arguments.command_parser.format_usage()))
    misplaced = []
    for argument, following in itertools.pairwise([*arguments.arguments, "--"]):
        option, equals, _ = argument.partition("=")
        if option in options:
            has_value = options[option] and not equals and not following.startswith("--")
            misplaced += [argument, following] if has_value else [argument]
    if misplaced:
        logger.info("note: %s after the script is passed to the script; put it before", " ".join(misplaced))


def _run_script_on_hosts(options: LaunchOptions, hosts: HostsConfig, call: Callable[..., Any], log_dir: Path) -> int:
    """Run the script on this host and others; return the exit code of the first host."""
    _, processes = options.process_range()
    with join_hosts(hosts, processes, options.hang_after) as group:
        folder = Path(group.share(str(log_dir)))
        launch_config = LaunchConfig(options.hang_after, options.grace, log_dir=folder, hosts=group)
        result = run_workers(call, processes=processes, launch_config=launch_config, environment=options.environment)
        return group.agree_on_exit(EXIT_STOPPED if result.stop_signal is not None else EXIT_DONE)


def _train(options: TrainingOptions, make_plan: Callable[[int], RunPlan]) -> int:
    """Train with the plan for a number of restarts by a launcher or by Slurm; return the exit code."""
    rendezvous = options.launch.rendezvous
    if options.launch.hosts is not None:
        return _train_on_hosts(options, options.launch.hosts, make_plan)
    if rendezvous is None:
        return _launch(options, make_plan(slurm_restarts(options.launch.requeue)))

    def make_tuned_plan(restarts: int) -> RunPlan:
        plan = make_plan(restarts)
        return options.with_tuned(plan, rendezvous.world_size) if rendezvous.is_on_one_machine else plan

    def rank_arguments(plan: RunPlan) -> tuple[Any, ...]:
        return plan.recipe, options.run_of(plan), plan.folder, plan.checkpoint, plan.step, plan.accept_changes

    plan, summary = run_as_rank(options.launch, rendezvous, "train", make_tuned_plan, rank_arguments)
    if rendezvous.rank == 0:
        return _finish(options, summary, plan.folder)
    if summary["stopped"]:
        # srun --kill-on-bad-exit would end rank 0 before its request to requeue the job.
        return EXIT_DONE if options.launch.requeue else EXIT_STOPPED
    return EXIT_FAILED if summary["has_failed"] else EXIT_DONE


def _train_on_hosts(options: TrainingOptions, hosts: HostsConfig, make_plan: Callable[[int], RunPlan]) -> int:
    """Train on this host and others, with the plan of the first host; return its exit code."""
    launch = options.launch
    _, processes = launch.process_range()
    with join_hosts(hosts, processes, launch.hang_after) as group:
        text = make_plan(slurm_restarts(launch.requeue)).to_json() if group.is_first else None
        plan = RunPlan.from_json(group.share(text))
        recipe = plan.recipe
        resolve_mesh(recipe.strategy, group.place.size, recipe.microbatch_count, recipe.batch_size)
        launch_config = LaunchConfig(launch.hang_after, launch.grace, log_dir=plan.folder / "logs", hosts=group)
        arguments = (recipe, options.run_of(plan), plan.folder, plan.checkpoint, plan.step, plan.accept_changes)
        result = launch_ranks("train", *arguments, processes=processes, launch_config=launch_config, options=launch)
        code = EXIT_DONE
        if group.is_first:
            code = _finish(options, result.value, plan.folder, stop_signal=result.stop_signal)
        return group.agree_on_exit(code)


def _launch(options: TrainingOptions, plan: RunPlan) -> int:
    folder, recipe, start = plan.folder, plan.recipe, (plan.checkpoint, plan.step, plan.accept_changes)
    held = HeldFolder(folder)
    processes = options.launch.process_range(plan.recipe)
    run = options.run_of(options.with_tuned(plan, processes[1]))

    def attempt(count: int, launch_config: LaunchConfig) -> LaunchResult:
        arguments = (recipe, run, folder, *start)
        return launch_ranks("train", *arguments, processes=count, launch_config=launch_config, options=options.launch)

    def newest_step() -> int:
        nonlocal recipe, start
        if not held.is_in_place():
            raise RunError(
                f"{folder} was moved, removed or replaced, so the run cannot be restarted",
                expected="the directory of a run keeps its path until a restart",
                fix="samestep resume with the new path of the run",
                code="E_NOT_A_RUN",
            )
        checkpoint = CheckpointFolder(folder / "checkpoints").newest_valid()
        start = (checkpoint, _step_of(checkpoint) if checkpoint else 0, False)
        if checkpoint is not None:
            saved = make_saved_recipe(read_state(checkpoint).progress.recipe, origin=str(checkpoint))
            recipe = with_saved_weight(recipe, saved)
        return start[1]

    try:
        result = launch_with_restarts(
            options.launch, processes, attempt, log_dir=folder / "logs", first_step=plan.step, newest_step=newest_step
        )
    except RankError as error:
        # To read the folder could take without end; and the newest checkpoint can contain wrong values.
        if error.failure.code in (E_DISK_HANG, WitnessError.default_code):
            raise
        steps = CheckpointFolder(folder / "checkpoints").steps()
        command = _command("resume", folder)
        hint = f"after the fix, resume after step {_step_of(steps[-1])} with: {command}" if steps else ""
        raise error.with_next_step(hint) from None
    return _finish(options, result.value, folder, stop_signal=result.stop_signal)


def _command(name: str, folder: Path) -> str:
    return shlex.join(["samestep", name, str(folder)])


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("step-")[2])  # also `.replaced-step-N`


def _finish(options: TrainingOptions, summary: dict[str, Any], folder: Path, *, stop_signal: int | None = None) -> int:
    """Print the summary, requeue the Slurm job if requested, and return the exit code."""
    own_signal, has_failed = summary.pop("stop_signal"), summary.pop("has_failed")
    if options.run.quiet:
        print_json({**summary, "run": str(folder)})
    else:
        _print_summary(summary, folder)
    if not summary["stopped"]:
        if has_failed:
            raise NonFiniteError(
                f"the run skipped {_skipped_steps(summary)}",
                expected="most steps update the weights",
                fix="lower the learning rate, set step.clip_norm, or find the first such step with "
                "step.non_finite=stop, in a new run",
            )
        return EXIT_DONE
    if options.launch.requeue:
        requeue_after(stop_signal or own_signal)
    return EXIT_STOPPED


def _skipped_steps(summary: dict[str, Any]) -> str:
    return f"{summary['skipped_steps']} of {plural(summary['step'], 'step')}, because loss or gradient was not finite"


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    evaluation = summary["evaluation"]
    values = {name: value for name, value in evaluation.items() if name not in ("loss", "samples")}
    lines = [(name, format_metric(name, value)) for name, value in values.items()]
    if evaluation:
        lines.append(("evaluated", f"{evaluation['samples']:,} samples"))
    if summary["samples_per_second"]:
        lines.append(("speed", f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s in all"))
    if summary["skipped_steps"]:
        lines.append(("skipped", _skipped_steps(summary)))
    lines.append(("run", str(folder)))
    if summary["stopped"]:
        lines.append(("stopped", f"after step {summary['step']}; resume with: {_command('resume', folder)}"))
    else:
        if (folder / "tensorboard").exists():
            lines.append(("curves", tensorboard_command(folder / "tensorboard")))
        lines.append(("evaluate", _command("eval", folder)))
    width = max(12, *(len(name) + 2 for name, _ in lines))
    print("\n".join(f"{name:<{width}}{text}" for name, text in lines))
