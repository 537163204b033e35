"""`samestep report`: HTML page about one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.cli.options import add_options, print_json, write_output
from samestep.errors import EXIT_DONE, InputError
from samestep.report_limits import printable

if TYPE_CHECKING:
    from samestep.tools.report.run import Run

_REPORT = "report.html"
Section = TypeVar("Section")


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
    write_output(render(report), out, "--out", MARK, "report")
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
