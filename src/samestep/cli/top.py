"""`samestep top`: live view of a run."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from samestep.cli.options import add_options, add_run_argument, print_json, write_output
from samestep.errors import EXIT_DONE, InputError
from samestep.tools.top.display import render, render_svg
from samestep.tools.top.run_status import RunReader
from samestep.units import parse_duration

_SVG_WIDTH = 110
_SVG_MARK = '<svg class="rich-terminal"'


def add_top(add_parser: Any) -> None:
    """Add `samestep top`."""
    parser = add_parser(
        description="Show the state of each rank of a run, read from the run's directory: before, during and after the "
        "run. Ctrl-C ends the view. Without a terminal, one picture is printed.",
        epilog="example: samestep top runs/first --once",
    )
    add_run_argument(parser)
    every = partial(parse_duration, "--every")
    parser.add_argument("--every", type=every, default="2s", metavar="TIME", help="time between updates (default 2s)")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write one picture to FILE as SVG and exit")
    add_options(parser, "--json")
    parser.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    """Show the run once, or until Ctrl-C."""
    reader, console = RunReader(arguments.folder), Console()
    is_live = console.is_terminal and not console.is_dumb_terminal
    if not (arguments.json or arguments.svg is not None or arguments.once) and is_live:
        _follow(arguments.folder, reader, console, arguments.every)
        return EXIT_DONE
    status = reader.read()
    if status is None:
        raise InputError(
            f"there is no run {arguments.folder}",
            expected="an existing run",
            fix="check the path, or wait for the run in a terminal without --once, --json and --svg",
            code="E_NOT_A_RUN",
        )
    if arguments.svg is not None:
        write_output(render_svg(status, _SVG_WIDTH), arguments.svg, "--svg", _SVG_MARK, "picture of samestep top")
    if arguments.json:
        print_json(asdict(status))
    elif arguments.svg is not None:
        print(f"{'picture':<12}{arguments.svg}")
    else:
        console.print(render(status, console.width))
    return EXIT_DONE


def _follow(folder: Path, reader: RunReader, console: Console, every: float) -> None:
    """Update the view until Ctrl-C."""

    def view() -> RenderableType:
        status = reader.read()
        if status is None:
            return Text(f"waiting for {folder}")
        return render(status, console.width, console.height)

    try:
        with Live(view(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(every)
                live.update(view(), refresh=True)
    except KeyboardInterrupt:
        print(file=sys.stdout, flush=True)
