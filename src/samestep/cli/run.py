"""`samestep run`: user scripts on any number of processes."""

from __future__ import annotations

import argparse
import itertools
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import LaunchOptions, add_fault_options, launch_with_restarts
from samestep.cli.options import add_options, output_folder, require_file, timed_name
from samestep.errors import EXIT_DONE, EXIT_STOPPED
from samestep.launcher.launch import LaunchConfig, LaunchResult, run_workers
from samestep.launcher.pickling import ByName


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
    add_fault_options(parser)
    add_options(parser.add_argument_group("output"), "--runs")
    parser.set_defaults(run=_run_script)


def _run_script(arguments: argparse.Namespace) -> int:
    """Run the script; return 0 if every rank succeeded, 130 after a request to stop."""
    require_single_process("run")
    script: Path = arguments.script
    require_file(script)
    options = LaunchOptions.parse(arguments)
    log_dir = arguments.runs / timed_name(arguments.runs, script.stem) / "logs"
    processes = options.process_range()
    call = partial(ByName("samestep.launcher.worker", "run_script"), script, tuple(arguments.arguments))
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
