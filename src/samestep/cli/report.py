"""`samestep report`: HTML page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.checkpoint.files import replacing
from samestep.cli.options import JsonOption, argument, option, output_errors
from samestep.errors import EXIT_DONE, InputError, printable

_REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Write one HTML file about one or several runs.

    The page has curves, samples per second, ranks, events and recipes, and needs no other file and
    no network. Runs can be unfinished.
    """

    example: ClassVar = "samestep report runs/first runs/second --out both.html"

    folders: Sequence[Path] = argument("RUN", "directory of a run", nargs="+", type=Path)
    out: Path | None = option(
        f"output file (default {_REPORT} in the directory of a single run, otherwise in the current one)",
        "FILE",
    )


def run(options: Options) -> int:
    """Write the page and print its path."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.report import MARK, report_page, summary
    from samestep.tools.run_log import read_runs

    runs = read_runs(options.folders)
    out = options.out
    if out is None:
        out = options.folders[0] / _REPORT if len(runs) == 1 else Path(_REPORT)
    _write(report_page(runs), out, MARK)
    notes = [
        f"{'note':<12}{printable(f'{run.name}: {remark}')}"
        for run in runs
        for remark in run.remarks
    ]
    data = {"report": str(out), "bytes": out.stat().st_size, "runs": list(map(summary, runs))}
    options.result(data, *notes, f"{'report':<12}{out}")
    return EXIT_DONE


def _write(text: str, out: Path, mark: str) -> None:
    """Write the page atomically; only an earlier page, which begins with `mark`, is overwritten."""
    with output_errors(
        f"{out} cannot be written", "a file in a writable folder", "--out with another path"
    ):
        if out.exists():
            with out.open("rb") as file:
                is_earlier = file.read(len(mark)) == mark.encode()
            if not is_earlier:
                expected = "a new file, or an earlier report"
                raise InputError(
                    f"{out} is not a report", expected, "--out with another name", code="E_OUTPUT"
                )
        with replacing(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
