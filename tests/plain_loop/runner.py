"""Runs plain scripts by plain Python, and with one added line on several processes.

    PYTHONPATH=src:tests python -m plain_loop.runner                    # all scripts
    PYTHONPATH=src:tests python -m plain_loop.runner NAME... --processes 1,2 --json FILE
    PYTHONPATH=src:tests python -m plain_loop.runner NAME:2,3 NAME:4     # numbers of processes of each script

`--processes 0` runs a script twice by plain Python. Two runs are compared: criterion in judge.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine_line, markdown_table, save

from plain_loop.forks import Run, preload
from plain_loop.judge import Verdict, deviation, judge
from plain_loop.script import Script, find_scripts

POLL_SECONDS = 0.005


def _runs_of(script: Script, processes: Sequence[int], folder: Path, rows: bool) -> list[Run]:
    """Return the runs of a script: by plain Python, with permuted rows if the tolerance is measured, and the others."""
    runs = [Run(script, 0, folder / f"{script.name}.plain")]
    if script.tolerance is None:
        runs.append(Run(script, 0, folder / f"{script.name}.permuted", permuted=True))
    numbers = [number for number in processes if number == 0 or number in script.processes]
    return runs + [Run(script, number, folder / f"{script.name}.{number}", rows=rows) for number in numbers]


def _verdicts(script: Script, runs: Sequence[Run]) -> list[Verdict]:
    """Return the verdicts of the runs, which have all ended."""
    plain = runs[0]
    others = [run for run in runs[1:] if not run.permuted]
    outcome = plain.outcomes()[0]
    if outcome.code or plain.hung:
        problem = f"plain Python fails with {outcome.code}: {outcome.errors[-2000:]}"
        return [Verdict(script.name, run.processes, "failed", problem=problem) for run in others]
    tolerance = script.tolerance
    if tolerance is None:
        found = deviation(outcome.lines, runs[1].outcomes()[0].lines)
        tolerance = 2 * found if isinstance(found, float) else 0.0
    return [judge(script, outcome.lines, tolerance, run) for run in others]


def run_scripts(
    scripts: Sequence[Script],
    processes: Sequence[int],
    *,
    slots: int | None = None,
    report: Callable[[Verdict], None] = lambda verdict: None,
    keep: Path | None = None,
    rows: bool = False,
) -> list[Verdict]:
    """Run scripts, and return a verdict for each number of processes.

    Args:
        scripts: the scripts.
        processes: numbers of processes; 0 for a second run of plain Python.
        slots: processes at a time; None for two per core.
        report: called with each verdict as soon as it is known.
        keep: folder for files of the runs, which are kept; None for a temporary one.
        rows: whether outputs of all sizes stay divided between the processes.
    """
    verdicts = []
    with run_folder(keep) as folder:
        runs: dict[Script, list[Run]] = {}
        for script in scripts:
            if script.missing:
                reason = f"needs {', '.join(script.missing)}"
                verdicts += [Verdict(script.name, number, "skipped", reasons=[reason]) for number in processes]
            else:
                runs[script] = _runs_of(script, processes, folder, rows)
        for script in ended(runs, slots):
            found = _verdicts(script, runs[script])
            verdicts += found
            for verdict in found:
                report(verdict)
            if keep is None and all(verdict.passed for verdict in found):
                for run in runs[script]:
                    shutil.rmtree(run.folder)
    return sorted(verdicts, key=lambda verdict: (verdict.script, verdict.processes))


@contextmanager
def run_folder(keep: Path | None) -> Iterator[Path]:
    """Folder for files of runs: `keep`, or a temporary one."""
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="plain-loop-") as folder:
        yield Path(folder)


def ended(runs: Mapping[Script, Sequence[Run]], slots: int | None) -> Iterator[Script]:
    """Yield scripts after the end of their runs. `slots` processes run at a time, at least one run."""
    limit = slots or 2 * len(os.sched_getaffinity(0))
    waiting = [run for of_script in runs.values() for run in of_script]
    running: list[Run] = []
    left = list(runs)
    try:
        while left:
            while waiting and (not running or sum(run.ranks for run in running) + waiting[0].ranks <= limit):
                waiting[0].start()
                running.append(waiting.pop(0))
            running = [run for run in running if not run.poll()]
            done = [script for script in left if not {*runs[script]} & {*running, *waiting}]
            left = [script for script in left if script not in done]
            yield from done
            time.sleep(POLL_SECONDS)
    finally:
        for run in running:
            run.end()


def command_line(name: str, description: str | None, processes: str) -> argparse.ArgumentParser:
    """Return a parser with the options of both runners."""
    parser = argparse.ArgumentParser(prog=name, description=(description or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of scripts; all if none")
    parser.add_argument("--processes", default=processes, help="numbers of processes")
    parser.add_argument("--json", type=Path, help="file of the verdicts")
    parser.add_argument("--result", type=Path, help="file of all verdicts, of which these are replaced, and its page")
    parser.add_argument("--keep", type=Path, help="new folder for output and files of the runs")
    parser.add_argument("--slots", type=int, help="processes at a time")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all verdicts are as expected."""
    parser = command_line("plain_loop.runner", __doc__, "1,2,3,4")  # 0: plain Python once more
    parser.add_argument("--rows", action="store_true", help="outputs of all sizes stay divided")
    options = parser.parse_args(arguments)
    scripts = find_scripts(options.names)
    machine = describe_machine()
    preload(scripts)
    began = time.monotonic()
    processes = [int(number) for number in options.processes.split(",")]
    verdicts = run_scripts(scripts, processes, slots=options.slots, report=_print, keep=options.keep, rows=options.rows)
    seconds = round(time.monotonic() - began, 1)
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    print(f"{len(verdicts)} runs of {len(scripts)} scripts in {seconds} s, {len(wrong)} not as expected")
    rows = [verdict.as_json() for verdict in verdicts]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.result is not None:
        if options.names:
            verdicts = _replaced(options.result, verdicts)
        exact = read_result(options.result).get("exact", [])
        result = {"machine": machine, "runs": [verdict.as_short_json() for verdict in verdicts], "exact": exact}
        save(options.result, result, page(verdicts, exact, machine))
    return 3 if wrong else 0


def read_result(result: Path) -> dict[str, Any]:
    """Return the content of a file of verdicts; empty if there is none."""
    if not result.exists():
        return {}
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return content


def _replaced(result: Path, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of a file, those of the scripts that ran again replaced."""
    again = {verdict.script for verdict in verdicts}
    rows = read_result(result).get("runs", [])
    found = [Verdict(**row) for row in rows if row["script"] not in again]
    return sorted([*found, *verdicts], key=lambda verdict: (verdict.script, verdict.processes))


def _print(verdict: Verdict) -> None:
    state = "ok   " if verdict.passed else "WRONG"
    calls = f"{verdict.divided} divided, {verdict.whole} whole"
    text = f"{state} {verdict.script:45} {verdict.processes}  {verdict.outcome:10} {verdict.kind:8} {calls}"
    if verdict.deviation:
        text += f"  {verdict.deviation:.0e}"
    if verdict.reasons:
        text += f"  [{'; '.join(verdict.reasons)}]"
    print(f"{text}  {verdict.seconds:.1f} s", flush=True)
    if verdict.problem:
        print("      " + verdict.problem.replace("\n", "\n      "), flush=True)


def page(verdicts: Sequence[Verdict], exact: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Return the Markdown page of a result: one row for each script.

    Args:
        verdicts: verdicts under `fast`.
        exact: verdicts under `exact`, of `plain_loop.exact`.
        machine: the machine.
    """
    bits = {verdict["script"]: _bits(verdict) for verdict in exact}
    by_script: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_script.setdefault(verdict.script, []).append(verdict)
    rows = []
    for name, found in by_script.items():
        several = [verdict for verdict in found if verdict.processes > 1] or found
        kinds = list(dict.fromkeys(verdict.kind or verdict.outcome for verdict in several))
        reasons = list(dict.fromkeys(reason for verdict in several for reason in verdict.reasons))
        deviations = [verdict.deviation for verdict in several if verdict.deviation is not None]
        largest = f"{max(deviations):.0e}" if deviations else ""
        numbers = ", ".join(_result(verdict) for verdict in found)
        text = "; ".join(reasons).replace("|", "\\|")
        rows.append([name, numbers, ", ".join(kinds), largest, bits.get(name, ""), text])
    header = [
        "script",
        "processes and result",
        "calls",
        "deviation",
        "same bits under exact",
        "reasons for whole calls",
    ]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row[2]] = counts.get(row[2], 0) + 1
    wrong = sum(not verdict.passed for verdict in verdicts)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return (
        "# Plain scripts with one added line\n\n"
        "Written by `make plain-loop`. Each script of `tests/plain_loop/scripts` runs by plain Python, and with\n"
        "`samestep.parallel` on 1 to 4 processes. *Equal* on one process: the same text. On several: the deviation of\n"
        "each number, relative to the largest number of its line, is within the tolerance of the script (1e-10 in\n"
        "float64). Under `exact`: numbers of processes on which the printed numbers, and parameters and states of\n"
        "optimizers after each step, have one SHA-256; *refused*: more ranks than microbatches.\n\n"
        f"{len(rows)} scripts: {summary}. {len(verdicts)} runs, {wrong} not as expected.\n\n"
        f"{markdown_table(header, rows)}\n\n{machine_line(machine)}\n"
    )


def _bits(verdict: dict[str, Any]) -> str:
    text = ", ".join(map(str, verdict["equal"]))
    if verdict["refused"]:
        text += f"; refused: {', '.join(map(str, verdict['refused']))}"
    if verdict["problem"]:
        text += "; **not as expected**"
    if verdict["calls"] in ("whole", "mixed"):
        text += f" ({verdict['calls']})"
    return text


def _result(verdict: Verdict) -> str:
    state = verdict.outcome if verdict.passed else f"**{verdict.outcome}, not as expected**"
    return f"{verdict.processes}: {state}"


if __name__ == "__main__":
    sys.exit(main())
