"""`samestep top` and `samestep report`: live view of a run, and HTML page about runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from samestep.checkpoint.files import replacing
from samestep.cli.options import add_options, add_run_argument, output_errors, print_json
from samestep.errors import EXIT_DONE, InputError
from samestep.report_limits import printable
from samestep.tools.top.display import render, render_svg
from samestep.tools.top.run_status import RunReader
from samestep.units import parse_duration

if TYPE_CHECKING:
    from samestep.tools.report.run import Run

_SVG_WIDTH = 110
_SVG_MARK = '<svg class="rich-terminal"'
_REPORT = "report.html"
Section = TypeVar("Section")


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


def add_report(add_parser: Any) -> None:
    """Add `samestep report`."""
    parser = add_parser(
        description="Write one HTML file about one or several runs: curves, ranks, classes, certificate, recipes and "
        "their differences, environment and checkpoints. The file needs no other file and no network. Runs can be "
        "unfinished.",
        epilog="example: samestep report runs/first runs/second --out both.html",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    text = f"output file (default {_REPORT} in the directory of a single run, otherwise in the current one)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    group = parser.add_argument_group("additional input; files in the directories of runs are included automatically")
    for option, source in (("--certificate", "samestep verify --out"), ("--evaluation", "samestep eval --report")):
        text = f"output of {source}"
        group.add_argument(option, type=Path, action="append", default=[], metavar="DIR", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_report)


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
        _write(render_svg(status, _SVG_WIDTH), arguments.svg, "--svg", _SVG_MARK, "picture of samestep top")
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


def _report(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.report.page import MARK, Report, render, summary
    from samestep.tools.report.results import CERTIFICATE_FILE, CLASSES_FILE, read_certificate, read_class_report
    from samestep.tools.report.run import read_runs

    runs = read_runs(arguments.folders)
    remarks: list[str] = []
    evaluations = _sections(runs, "--evaluation", arguments.evaluation, CLASSES_FILE, read_class_report, remarks)
    certificates = _sections(runs, "--certificate", arguments.certificate, CERTIFICATE_FILE, read_certificate, remarks)
    report = Report(runs, evaluations, certificates, remarks)
    out = arguments.out or (arguments.folders[0] / _REPORT if len(arguments.folders) == 1 else Path(_REPORT))
    _write(render(report), out, "--out", MARK, "report")
    if arguments.json:
        print_json({"report": str(out), "bytes": out.stat().st_size, **summary(report)})
        return EXIT_DONE
    for remark in report.remarks:
        print(f"{'note':<12}{printable(remark)}")
    print(f"{'report':<12}{out}")
    return EXIT_DONE


def _sections(
    runs: Sequence[Run],
    option: str,
    folders: Sequence[Path],
    file: str,
    read: Callable[[Path], Section],
    remarks: list[str],
) -> list[tuple[int | None, Section]]:
    """Return the sections of requested folders, and those in the directories of runs with the number of the run.

    A section is a file of the name `file`, in the directory of a run or one level below. Invalid content is an error
    in a requested folder, and a remark in the directory of a run.
    """
    sections: list[tuple[int | None, Section]] = []
    for folder in folders:
        try:
            sections.append((None, read(folder)))
        except InputError as error:
            raise InputError(f"{option} {folder}: {error.value}", error.expected, error.fix, code=error.code) from error
    known = {folder.resolve() for folder in folders}
    for number, source in enumerate(runs):
        for path in sorted([*source.folder.glob(file), *source.folder.glob(f"*/{file}")]):
            if path.parent.resolve() in known:
                continue
            try:
                sections.append((number, read(path.parent)))
            except InputError as error:
                remarks.append(error.value)
    return sections


def _write(text: str, out: Path, option: str, mark: str, kind: str) -> None:
    """Write a file atomically; only an earlier file of the kind, which begins with `mark`, is overwritten."""
    with output_errors(f"{out} cannot be written", "a file in a writable folder", f"{option} with another path"):
        if out.exists():
            with out.open("rb") as file:
                is_earlier = file.read(len(mark)) == mark.encode()
            if not is_earlier:
                raise InputError(
                    f"{out} is not a {kind}",
                    expected=f"a new file, or an earlier {kind}",
                    fix=f"{option} with another name, or remove the file",
                    code="E_OUTPUT",
                )
        with replacing(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
