"""`samestep report`: HTML page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.cli.options import JsonOption, argument, option, print_json, write_output
from samestep.errors import EXIT_DONE
from samestep.report_limits import printable

_REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Write one HTML file about one or several runs.

    The page has curves, samples per second, ranks, events and recipes, and needs no other file and no network. Runs can
    be unfinished.
    """

    example: ClassVar = "samestep report runs/first runs/second --out both.html"

    folders: Sequence[Path] = argument("RUN", "directory of a run", nargs="+", type=Path)
    out: Path | None = option(
        f"output file (default {_REPORT} in the directory of a single run, otherwise in the current one)", "FILE"
    )


def run(options: Options) -> int:
    """Write the page and print its path."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.report.page import MARK, render, summary
    from samestep.tools.report.run import read_runs

    runs = read_runs(options.folders)
    out = options.out
    if out is None:
        out = options.folders[0] / _REPORT if len(runs) == 1 else Path(_REPORT)
    write_output(render(runs), out, "--out", MARK, "report")
    if options.json:
        print_json({"report": str(out), "bytes": out.stat().st_size, "runs": list(map(summary, runs))})
        return EXIT_DONE
    for each in runs:
        for remark in each.remarks:
            print(f"{'note':<12}{printable(f'{each.name}: {remark}')}")
    print(f"{'report':<12}{out}")
    return EXIT_DONE
