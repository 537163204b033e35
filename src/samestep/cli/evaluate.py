"""`samestep eval`: evaluate a checkpoint of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli import options
from samestep.cli.resume import open_run
from samestep.errors import EXIT_DONE
from samestep.record.values import shown


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a checkpoint",
        description="Evaluate a checkpoint of a run; every sample counts once, on any number of processes.",
        epilog="example: samestep eval runs/first --checkpoint best",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, last, or a step (default best)")
    options.add_machine_options(parser)
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print `loss`, `samples` and the metrics."""
    recipe, checkpoint, step = open_run(arguments.folder, arguments.checkpoint, [])
    chosen = options.run_options(arguments)
    values = options.launch_ranks(
        "evaluate", recipe, chosen, checkpoint, processes=arguments.processes, device=arguments.device, log_dir=None
    )
    if arguments.json:
        options.print_json({"checkpoint": str(checkpoint), "step": step, **values})
        return EXIT_DONE
    lines = [f"{'checkpoint':<12}{checkpoint}"]
    lines += [f"{name:<12}{shown(name, value)}" for name, value in values.items()]
    print("\n".join(lines))
    return EXIT_DONE
