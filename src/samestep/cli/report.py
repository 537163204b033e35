"""`samestep report`: HTML page about one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.cli.options import add_options, print_json, write_output
from samestep.errors import EXIT_DONE
from samestep.report_limits import printable

_REPORT = "report.html"


def add_report(add_parser: Any) -> None:
    """Add `samestep report`."""
    parser = add_parser(
        description="Write one HTML file about one or several runs: curves, samples per second, ranks, events and "
        "recipes. The file needs no other file and no network. Runs can be unfinished.",
        epilog="example: samestep report runs/first runs/second --out both.html",
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    text = f"output file (default {_REPORT} in the directory of a single run, otherwise in the current one)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.report.page import MARK, render, summary
    from samestep.tools.report.run import read_runs

    runs = read_runs(arguments.folders)
    out = arguments.out
    if out is None:
        out = arguments.folders[0] / _REPORT if len(runs) == 1 else Path(_REPORT)
    write_output(render(runs), out, "--out", MARK, "report")
    if arguments.json:
        print_json({"report": str(out), "bytes": out.stat().st_size, "runs": [summary(run) for run in runs]})
        return EXIT_DONE
    for run in runs:
        for remark in run.remarks:
            print(f"{'note':<12}{printable(f'{run.name}: {remark}')}")
    print(f"{'report':<12}{out}")
    return EXIT_DONE
