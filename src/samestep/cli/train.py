"""`samestep train`: a new run of a recipe."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.checkpoint.store import CheckpointFolder
from samestep.cli import device_batch, layouts, member, options, ranks, requeue, tuned
from samestep.cli.member import Plan
from samestep.cli.opened import plan_to_go_on
from samestep.cli.restarts import add_fault_options, keep_going
from samestep.config import Recipe
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError, SamestepError
from samestep.recipes.parse import load_recipe, shipped_recipes, write_recipe
from samestep.record.values import shown
from samestep.runtime.crew import RankError, Terms
from samestep.runtime.launch import Outcome
from samestep.runtime.rendezvous import Rendezvous


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe on any number of processes, with the same result.",
        epilog="example: samestep train digits --processes 2 --set epochs=5 --name first",
    )
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    options.add_set_option(parser)
    device_batch.add_option(parser)
    options.add_machine_options(parser)
    tuned.add_option(parser)
    layouts.add_options(parser)
    options.add_saving_options(parser)
    options.add_check_option(parser)
    requeue.add_option(add_fault_options(parser))
    group = parser.add_argument_group("where it goes")
    group.add_argument("--name", help="name of the run (default: recipe, date and time)")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when all epochs are done, 130 when somebody asked to end."""
    arguments.overrides = [*layouts.overrides(arguments), *arguments.overrides]
    found = member.settled(arguments)
    made: list[Path] = []
    is_first = not (arguments.runs / (arguments.name or "name")).parent.exists()
    try:
        if found is not None:
            return run_as_member(arguments, found, lambda restarts: _plan(arguments, made, restarts))
        return run_ranks(arguments, _plan(arguments, made, requeue.restarts(arguments)))
    except SamestepError as error:
        if made and error.exit_code in (InputError.exit_code, EXIT_STOPPED):
            _remove_if_empty(made[0], with_parent=is_first)
        raise


def _plan(arguments: argparse.Namespace, made: list[Path], restarts: int = 0) -> Plan:
    """A new run, which is then in `made`; the run of that name where a launcher has started the command anew."""
    if restarts and arguments.name and (arguments.runs / arguments.name).exists():
        return plan_to_go_on(arguments.runs / arguments.name, arguments.overrides)
    recipe = load_recipe(arguments.recipe, device_batch.overrides(arguments))
    options.run_options(arguments)  # what cannot be is refused before there is a run
    folder: Path = arguments.runs / (arguments.name or options.free_name(arguments.runs, Path(arguments.recipe).stem))
    meant = device_batch.told(arguments, recipe)
    _create(folder, recipe)
    made.append(folder)
    if restarts:
        print(f"restart {restarts} begins a new run, {folder}: no --name says which to go on with", file=sys.stderr)
    if meant and not arguments.json:
        print(meant, file=sys.stderr)
    return Plan(recipe, folder)


def run_as_member(arguments: argparse.Namespace, found: Rendezvous, settle: Callable[[int], Plan]) -> int:
    """Train as one rank of another launcher's job; rank 0 settles what, and prints the summary."""

    def settle_all(restarts: int) -> Plan:
        plan = settle(restarts)
        return tuned.with_tuned(plan, arguments, found.world_size) if found.is_on_one_machine else plan

    def call(train: Callable[..., Any], plan: Plan) -> Any:
        return train(plan.recipe, tuned.run_options(arguments, plan), plan.run, plan.checkpoint, plan.step)

    plan, summary = member.take_part(arguments, found, "train", settle_all, call)
    return _finish(arguments, summary, plan.run, is_told=found.rank == 0)


def run_ranks(arguments: argparse.Namespace, plan: Plan) -> int:
    """Launch ranks that train as planned, and print the summary."""
    folder, first_step = plan.run, plan.step
    begin = [(plan.checkpoint, first_step)]  # of the attempt to come
    devices = ranks.devices(arguments.devices, arguments.device)
    count = ranks.bounds(arguments.processes, arguments.device, plan.recipe, devices)
    chosen = tuned.run_options(arguments, tuned.with_tuned(plan, arguments, count[1]))

    def attempt(processes: int, terms: Terms) -> Outcome:
        given = (plan.recipe, chosen, folder, *begin[-1])
        return ranks.launch_ranks("train", *given, processes=processes, terms=terms, devices=devices)

    def newest() -> int:
        found = CheckpointFolder(folder / "checkpoints").newest_whole()
        begin.append((found, _step_of(found) if found else 0))
        return begin[-1][1]

    logs = folder / "logs"
    try:
        outcome = keep_going(arguments, count, attempt, log_dir=logs, first_step=first_step, newest=newest)
    except RankError as error:
        raise error.with_way_out(_way_out(folder)) from None
    return _finish(arguments, outcome.value, folder, asked_by=outcome.asked_by)


def _finish(
    arguments: argparse.Namespace,
    summary: dict[str, Any],
    folder: Path,
    *,
    is_told: bool = True,
    asked_by: int | None = None,
) -> int:
    asked_by = asked_by or summary["stop_signal"]
    del summary["stop_signal"]
    if arguments.json and is_told:
        options.print_json({**summary, "run": str(folder)})
    elif is_told:
        _print_summary(summary, folder)
    if summary["stopped"] and is_told:
        requeue.requeue_if_asked(arguments, asked_by)
    return EXIT_STOPPED if summary["stopped"] else EXIT_DONE


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _way_out(folder: Path) -> str:
    saved = CheckpointFolder(folder / "checkpoints").steps()
    return f"once it is mended, go on after step {_step_of(saved[-1])} with: samestep resume {folder}" if saved else ""


def _create(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(
            f"the run {folder} exists",
            rule="a new run has a new name; nothing is written over",
            do=f"--name another, or samestep resume {folder}",
        ) from error
    except OSError as error:
        raise InputError(
            f"the run {folder} cannot be made: {error.strerror}", rule="a folder that can be written", do="--runs DIR"
        ) from error
    write_recipe(recipe, folder / "recipe.yaml")


def _remove_if_empty(folder: Path, *, with_parent: bool) -> None:
    """Take a run away again that bad input ended before its first checkpoint, so that its name is free."""
    if not (folder / "checkpoints").exists():
        shutil.rmtree(folder)
        if with_parent and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    evaluation = summary["evaluation"]
    values = {name: value for name, value in evaluation.items() if name not in ("loss", "samples")}
    lines = [(name, shown(name, value)) for name, value in values.items()]
    if evaluation:
        lines.append(("evaluated", f"{evaluation['samples']:,} samples"))
    if summary["samples_per_second"]:
        lines.append(("speed", f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s in all"))
    lines.append(("run", str(folder)))
    if summary["stopped"]:
        lines.append(("stopped", f"after step {summary['step']}; go on with: samestep resume {folder}"))
    else:
        lines.append(("curves", f"tensorboard --logdir {folder / 'tensorboard'}"))
        lines.append(("evaluate", f"samestep eval {folder}"))
    width = max(12, *(len(name) + 2 for name, _ in lines))
    print("\n".join(f"{name:<{width}}{text}" for name, text in lines))
