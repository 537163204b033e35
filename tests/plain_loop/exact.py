"""Runs plain scripts with the reduction `exact` on several numbers of processes, and compares all bits.

    PYTHONPATH=src:tests:. python -m plain_loop.exact                    # all scripts
    PYTHONPATH=src:tests:. python -m plain_loop.exact NAME... --processes 1,2,3 --json FILE

    ... --layouts fsdp:2,hsdp:4

Of each run a SHA-256 is taken: of the printed numbers, and of parameters and states after each step of an optimizer.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.machine import save

from plain_loop.forks import Run, preload
from plain_loop.judge import Verdict, deviation
from plain_loop.runner import command_line, ended, page, read_result, run_folder
from plain_loop.script import Script, find_scripts

PROCESSES = (1, 2, 3, 5, 8)
TOO_MANY = "E_TOO_MANY_RANKS"
_ROUNDING = 1e-9


@dataclass
class ExactVerdict:
    """Result of one script.

    Attributes:
        script: name of the script.
        equal: numbers of processes with the bits of the first one.
        refused: numbers of processes with more ranks than microbatches.
        layouts: `equal`, `close` if calls are whole there and not divided, or the error that ends the script; by
            strategy and number of processes.
        calls: `divided`, `whole` or `mixed`.
        problem: why the script is not as expected; empty if it is.
        reasons: reasons for whole calls.
        seconds: time of the longest run.
    """

    script: str
    equal: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)
    calls: str = ""
    problem: str = ""
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _runs_of(script: Script, processes: Sequence[int], folder: Path, layouts: Sequence[str]) -> list[Run]:
    digests = not any(layout.startswith("pp") for layout in layouts)
    create = partial(Run, script, exact=True, digests_steps=digests)
    runs = [create(processes=number, folder=folder / f"{script.name}.exact{number}") for number in processes]
    for layout in layouts:
        strategy, number = layout.split(":")
        place = folder / f"{script.name}.{strategy}{number}"
        runs.append(create(processes=int(number), folder=place, strategy=strategy))
    return runs


def _verdict(script: Script, runs: Sequence[Run]) -> ExactVerdict:
    """Return the verdict; all runs have ended."""
    verdict = ExactVerdict(script.name, seconds=max(run.seconds for run in runs))
    first = None
    for run in runs:
        outcomes = run.outcomes()
        errors = {outcome.error for outcome in outcomes}
        if TOO_MANY in errors and run.processes > 1:
            if run.strategy == "ddp":
                verdict.refused.append(run.processes)
            continue
        expected = {*script.words.split(), *script.allowed, None}
        if script.expected == "error" and run.processes > 1 and errors != {None} and errors <= expected:
            continue  # it does not do the same on all ranks
        is_allowed = script.expected == "error" or errors <= {*script.allowed, TOO_MANY}
        # A script that ends with an error on one process ends so on all numbers, with the same lines.
        facts = {(outcome.digest, outcome.code, outcome.error) for outcome in outcomes}
        if first is None:
            first = next(iter(facts))
            verdict.calls, verdict.reasons = _calls(outcomes[0].summary)
        layout = _layout(runs[0], run, is_equal=facts == {first})
        if layout:
            verdict.layouts[f"{run.strategy}:{run.processes}"] = layout
        elif run.hung or (any(outcome.code for outcome in outcomes) and not is_allowed):
            verdict.problem = f"{run.processes} processes hang or fail: {outcomes[0].errors[-2000:]}"
        elif facts == {first}:
            verdict.equal.append(run.processes)
        elif not verdict.problem:
            verdict.problem = f"{run.strategy} {run.processes} processes differ: {sorted(errors, key=str)}"
            verdict.problem += "".join(outcome.errors[-1500:] for outcome in outcomes[:2] if outcome.code)
    ends_by_time = bool(script.allowed)  # with states of another number of steps
    if (script.numbers_vary or ends_by_time) and not any(run.hung for run in runs):
        verdict.problem = ""
    return verdict


def _layout(first: Run, run: Run, *, is_equal: bool) -> str:
    """Return the entry of `ExactVerdict.layouts` for a run; empty for `ddp`, and for a difference."""
    errors = {outcome.error for outcome in run.outcomes()}
    if run.strategy == "ddp" or run.hung or len(errors) > 1:
        return ""
    if errors != {None}:
        return str(errors.pop())
    if is_equal:
        return "equal"
    # Whole, where the trace of the stages is not right.
    return "close" if run.strategy == "pp" and _is_close(first, run) else ""


def _is_close(first: Run, run: Run) -> bool:
    """Whether the numbers of all ranks are those of the first run to rounding in float64."""
    found = [deviation(first.outcomes()[0].lines, outcome.lines) for outcome in run.outcomes()]
    return all(isinstance(one, float) and one < _ROUNDING for one in found)


def _calls(summary: list[dict[str, object]]) -> tuple[str, list[str]]:
    divided = sum(int(str(module["divided"])) for module in summary)
    whole = sum(int(str(module["whole"])) for module in summary)
    reasons = [str(reason) for module in summary for reason in module["reasons"]]  # type: ignore[attr-defined]
    kind = "mixed" if divided and whole else "divided" if divided else "whole" if whole else ""
    return kind, list(dict.fromkeys(reasons))


def run_exact(
    scripts: Sequence[Script],
    processes: Sequence[int] = PROCESSES,
    *,
    slots: int | None = None,
    report: Callable[[ExactVerdict], None] = lambda verdict: None,
    keep: Path | None = None,
    layouts: Sequence[str] = (),
) -> list[ExactVerdict]:
    """Run scripts under `exact`, and return a verdict for each.

    Args:
        scripts: the scripts.
        processes: numbers of processes.
        slots: processes at a time; None for two per core.
        report: called with each verdict as soon as it is known.
        keep: folder for files of the runs, which are kept; None for a temporary one.
        layouts: strategies and numbers of processes, as `fsdp:2`.
    """
    verdicts = []
    with run_folder(keep) as folder:
        runs = {script: _runs_of(script, processes, folder, layouts) for script in scripts if not script.missing}
        for script in ended(runs, slots):
            verdicts.append(_verdict(script, runs[script]))
            report(verdicts[-1])
            if keep is None:
                for run in runs[script]:
                    shutil.rmtree(run.folder)
    return sorted(verdicts, key=lambda verdict: verdict.script)


def _print(verdict: ExactVerdict) -> None:
    state = "WRONG" if verdict.problem else "ok   "
    text = f"{state} {verdict.script:45} {verdict.calls:8} equal on {verdict.equal}, refused on {verdict.refused}"
    if verdict.layouts:
        text += f" {verdict.layouts}"
    if verdict.reasons:
        text += f"  [{'; '.join(verdict.reasons)}]"
    print(f"{text}  {verdict.seconds:.1f} s", flush=True)
    if verdict.problem:
        print("      " + verdict.problem.replace("\n", "\n      "), flush=True)


def _add_to_result(path: Path, verdicts: Sequence[ExactVerdict]) -> None:
    """Put the verdicts into a result of the runner; those of other scripts stay."""
    result = read_result(path)
    again = {verdict.script for verdict in verdicts}
    rows = [row for row in result.get("exact", []) if row["script"] not in again]
    short = [
        {name: value for name, value in asdict(verdict).items() if name not in ("seconds", "reasons")}
        for verdict in verdicts
    ]
    result["exact"] = sorted([*rows, *short], key=lambda row: str(row["script"]))
    save(path, result, page([Verdict(**row) for row in result["runs"]], result["exact"], result["machine"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all scripts are as expected."""
    parser = command_line("plain_loop.exact", __doc__, ",".join(map(str, PROCESSES)))
    parser.add_argument("--layouts", default="", help="strategies and numbers of processes, as fsdp:2,hsdp:4")
    parser.add_argument("--threads", type=int, default=1, help="threads of an operation in each process")
    options = parser.parse_args(arguments)
    scripts = find_scripts(options.names)
    preload(scripts, threads=options.threads)
    processes = [int(number) for number in options.processes.split(",")]
    layouts = [layout for layout in options.layouts.split(",") if layout]
    verdicts = run_exact(scripts, processes, slots=options.slots, report=_print, keep=options.keep, layouts=layouts)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1), encoding="utf-8")
    if options.result is not None:
        _add_to_result(options.result, verdicts)
    wrong = sum(bool(verdict.problem) for verdict in verdicts)
    print(f"{len(verdicts)} scripts, {wrong} not as expected")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
