"""`samestep top`: what a run is doing."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from samestep.cli import options
from samestep.cli.durations import seconds
from samestep.errors import EXIT_DONE, InputError
from samestep.tools.top.picture import Picture
from samestep.tools.top.shown import drawn, svg
from samestep.tools.top.watch import RunWatch

_SVG_WIDTH = 110


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "top",
        help="show what a run is doing",
        description="Show what each rank of a run is doing, from the run's directory alone: before the run is there, "
        "while it goes and after it. Ctrl-C ends it. Where there is no terminal, one picture is printed.",
        epilog="example: samestep top runs/first --once",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--every", default="2s", metavar="TIME", help="how often to look (default 2s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write one picture to FILE, as an SVG, and end")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it, until somebody ends it."""
    every = seconds("--every", arguments.every)
    watch, console = RunWatch(arguments.folder), Console()
    if arguments.json or arguments.svg is not None or arguments.once or not _is_live(console):
        picture = watch.look()
        if picture is None:
            raise InputError(
                f"there is no run {arguments.folder}",
                rule="one picture is of a run that is there",
                do="look at the path, or wait for it in a terminal, without --once, --json and --svg",
            )
        _print_once(arguments, console, picture)
        return EXIT_DONE
    _follow(arguments.folder, watch, console, every)
    return EXIT_DONE


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _print_once(arguments: argparse.Namespace, console: Console, picture: Picture) -> None:
    if arguments.svg is not None:
        _write(arguments.svg, svg(picture, _SVG_WIDTH))
    if arguments.json:
        options.print_json(asdict(picture))
    elif arguments.svg is not None:
        print(f"{'picture':<12}{arguments.svg}")
    else:
        console.print(drawn(picture, console.width))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}", rule="--svg is a file that can be written", do="another one"
        ) from error


def _follow(folder: Path, watch: RunWatch, console: Console, every: float) -> None:
    """Look again and again, until Ctrl-C."""
    try:
        first = _shown(folder, watch.look(), console)
        with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(every)
                live.update(_shown(folder, watch.look(), console), refresh=True)
    except KeyboardInterrupt:
        print(file=sys.stdout, flush=True)


def _shown(folder: Path, picture: Picture | None, console: Console) -> RenderableType:
    if picture is None:
        return Text(f"waiting for {folder} to begin")
    return drawn(picture, console.width, console.height)
