"""`samestep report`: one page of HTML about one run or several."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.cli import options
from samestep.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from samestep.tools.report.page import Report
    from samestep.tools.report.run import Run

_NAME = "report.html"
Part = TypeVar("Part")


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "report",
        help="write a page of HTML about one run or several",
        description="Write one file of HTML about one run, or several side by side: curves, what each rank did, "
        "classes, certificate, recipes and where they differ, environment and checkpoints. It needs no other file and "
        "no network. A run may go on meanwhile.",
        epilog="example: samestep report runs/first runs/second --out both.html",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"what to write (default {_NAME} in the run's folder; of several runs, in this one)",
    )
    group = parser.add_argument_group("what else is shown; what lies in a run's folder is found there")
    group.add_argument(
        "--certificate", type=Path, action="append", default=[], metavar="DIR", help="what samestep verify --out wrote"
    )
    group.add_argument(
        "--evaluation", type=Path, action="append", default=[], metavar="DIR", help="what samestep eval --report wrote"
    )
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    # Imported here: the other commands have no use for them.
    from samestep.tools.report.page import render
    from samestep.tools.report.summary import summary

    report = _read(arguments)
    out = arguments.out or (arguments.folders[0] / _NAME if len(arguments.folders) == 1 else Path(_NAME))
    _write(render(report), out)
    if arguments.json:
        options.print_json({"report": str(out), "bytes": out.stat().st_size, **summary(report)})
        return EXIT_DONE
    for remark in report.remarks:
        print(f"{'note':<12}{remark}")
    print(f"{'report':<12}{out}")
    return EXIT_DONE


def _read(arguments: argparse.Namespace) -> Report:
    from samestep.tools.report.certificates import find_certificates, read_certificate
    from samestep.tools.report.page import Report
    from samestep.tools.report.pictures import find_reports, read_report
    from samestep.tools.report.run import read_runs

    runs = read_runs(arguments.folders)
    remarks: list[str] = []
    evaluations = _parts(runs, arguments.evaluation, find_reports, read_report, remarks)
    certificates = _parts(runs, arguments.certificate, find_certificates, read_certificate, remarks)
    return Report(runs, evaluations, certificates, remarks)


def _parts(
    runs: Sequence[Run],
    given: Sequence[Path],
    find: Callable[[Path], list[Path]],
    read: Callable[[Path], Part],
    remarks: list[str],
) -> list[tuple[int | None, Part]]:
    """What is in the folders that were given, which must be there, and in those found in runs, each with its run."""
    parts: list[tuple[int | None, Part]] = [(None, read(folder)) for folder in given]
    known = {folder.resolve() for folder in given}
    for number, its_run in enumerate(runs):
        for folder in find(its_run.folder):
            if folder.resolve() in known:
                continue
            try:
                parts.append((number, read(folder)))
            except InputError as error:
                remarks.append(error.value)
    return parts


def _write(page: str, out: Path) -> None:
    """The page, whole or not at all; only an earlier report gives way."""
    from samestep.tools.report.page import MARK

    aside = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        if out.exists() and not _begins_with(out, MARK):
            raise InputError(
                f"{out} is no report", rule="only an earlier report is written over", do="--out another, or remove it"
            )
        try:
            aside.write_text(page, encoding="utf-8")
            aside.replace(out)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.strerror}",
            rule="a file in a folder that is there and can be written to",
            do="--out another",
        ) from error


def _begins_with(path: Path, mark: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark.encode()
