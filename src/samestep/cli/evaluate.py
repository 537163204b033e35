"""`samestep eval`: evaluate a checkpoint of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import class_report, layouts, member, options, ranks, weights_file
from samestep.cli.member import Plan
from samestep.cli.opened import open_run
from samestep.errors import EXIT_DONE
from samestep.record.values import shown
from samestep.runtime.crew import Terms
from samestep.runtime.watchdog import HANG_AFTER


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a checkpoint, or a file of weights",
        description="Evaluate a checkpoint of a run, or a file of weights with a recipe; every sample counts once, on "
        "any number of processes.",
        epilog="example: samestep eval runs/first --checkpoint best",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory; with --pretrained, a recipe")
    parser.add_argument("--checkpoint", metavar="WHICH", help="best, last, or a step (default best)")
    weights_file.add_options(parser)
    class_report.add_option(parser)
    options.add_machine_options(parser)
    layouts.add_options(parser)
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print `loss`, `samples` and the metrics."""
    found = member.settled(arguments)
    if found is not None:
        plan, values = member.take_part(
            arguments,
            found,
            "evaluate",
            lambda restarts: _plan(arguments),
            lambda evaluate, plan: evaluate(*_given(arguments, plan)),
        )
        if found.rank != 0:
            return EXIT_DONE
    else:
        plan = _plan(arguments)
        values = _launched(arguments, plan)
    by_class = values.pop("by_class", None)
    found_all = {"checkpoint": str(plan.checkpoint), "step": plan.step, **values}
    report = class_report.write(arguments.report, by_class, found_all) if by_class is not None else []
    if arguments.json:
        options.print_json(found_all)
        return EXIT_DONE
    width = max(12, *(len(name) + 2 for name in values))
    lines = [f"{'checkpoint':<{width}}{plan.checkpoint}"]
    lines += [f"{name:<{width}}{shown(name, value)}" for name, value in values.items()]
    print("\n".join(lines + report))
    return EXIT_DONE


def _plan(arguments: argparse.Namespace) -> Plan:
    class_report.prepare(arguments.report)
    of_file = weights_file.plan(arguments)
    if of_file is not None:
        return of_file
    # How a run lived on devices while it trained is not asked of a machine that evaluates it.
    layout = ["strategy={}", *layouts.overrides(arguments)]
    recipe, checkpoint, step = open_run(arguments.folder, arguments.checkpoint or "best", layout)
    return Plan(recipe, arguments.folder, checkpoint, step)


def _given(arguments: argparse.Namespace, plan: Plan) -> tuple[Any, ...]:
    """What `samestep.recipes.run.evaluate` takes."""
    return plan.recipe, options.run_options(arguments), plan.checkpoint, arguments.report


def _launched(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    devices = ranks.devices(arguments.devices, arguments.device)
    _, processes = ranks.bounds(arguments.processes, arguments.device, plan.recipe, devices)
    terms = Terms(HANG_AFTER)
    given = _given(arguments, plan)
    outcome = ranks.launch_ranks(
        "evaluate", *given, processes=processes, terms=terms, devices=devices, preload=ranks.EVALUATING
    )
    values: dict[str, Any] = outcome.value
    return values
