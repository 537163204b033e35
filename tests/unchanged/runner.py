"""Compares unchanged scripts on several processes with plain Python.

    PYTHONPATH=tests:. python -m unchanged.runner                    # all scripts of tests/scripts
    PYTHONPATH=tests:. python -m unchanged.runner NAME... --processes 2,3

Checks of each script:

- *text*: what it prints on 1, 2, 3 and 4 processes is that of plain Python, numbers rounded to 3 digits. A text that
  differs must be equal with float64: rounding has changed it;
- *float64*: the parameters of the first 10 steps differ by at most 1e-10, with float64 as default type;
- *fsdp*: with divided parameters on 3 processes, text as above, or an error that says what torch cannot do with them;
- *bits*: with `--exact`, text and steps on 1, 2 and 3 processes have one SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from benchmarks.machine import describe_machine, machine_line, markdown_table, save

from samestep.launcher.failure import RankError
from samestep.launcher.launch import LaunchConfig, run_workers
from samestep.launcher.pickling import ByName
from unchanged.observer import Observed

SCRIPTS = Path(__file__).parents[1] / "scripts"
PRELOAD = ("numpy", "torchvision", "torch.optim.lr_scheduler", "samestep.script.unchanged", "unchanged.observer")
LIMIT_DOUBLE = 1e-10
_NUMBER = re.compile(r"[-+]?\d+\.\d+(?:[eE][-+]?\d+)?")
_TIMES = re.compile(r"\b\d+(\.\d+)?\s?(it/s|s/it|ms|s)\b|\d+:\d\d")


@dataclass
class Verdict:
    """Result of one script."""

    script: str
    problems: list[str] = field(default_factory=list)
    divided: int = 0
    whole: int = 0
    reasons: list[str] = field(default_factory=list)
    double: float | None = None
    seconds: float = 0.0
    note: str = ""
    sharded: str = "not run"  # with `--strategy fsdp`
    is_rounded: bool = False  # the text is equal with float64 only

    @property
    def kind(self) -> str:
        """`divided`, `mixed` or `whole`."""
        if not self.divided:
            return "whole"
        return "mixed" if self.whole > self.divided else "divided"


def execute(observed: Observed, processes: int) -> str:
    """Run a script, and return the text of its failure, if any."""
    config = LaunchConfig(hang_after=60, log_dir=observed.folder / "logs")
    function = ByName("unchanged.observer", "run")
    try:
        run_workers(function, observed, processes=processes, launch_config=config, preload=PRELOAD)
    except RankError as error:
        return str(error)
    return ""


def _reason(failure: str) -> str:
    """Return the line of a failure that names the exception."""
    lines = [line.strip() for line in failure.splitlines() if re.match(r"\s*\w*(Error|Exception)\b", line)]
    return (lines or failure.strip().splitlines())[0][:200]


def rounded(text: str) -> list[str]:
    """Return the lines of a text, without lines with times, as of progress bars."""
    lines = []
    for line in re.split(r"[\r\n]+", _TIMES.sub("TIME", text)):
        if "TIME" not in line:
            lines.append(" ".join(line.split()))
    return lines


def same_numbers(one: str, other: str) -> bool:
    """Whether two lines are equal up to the third digit of their numbers."""
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    for first, second in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True):
        digits = len(first.split("e")[0].split(".")[1])
        unit = 1.01 * 10.0**-digits if "e" not in first else 0.0
        a = float(first)
        b = float(second)
        if abs(a - b) > max(2e-3 * max(abs(a), abs(b)), unit):
            return False
    return True


def different_line(one: str, other: str) -> str | None:
    """Return the first pair of lines that differ, or None."""
    first = rounded(one)
    second = rounded(other)
    for a, b in zip(first, second, strict=False):
        if not same_numbers(a, b):
            return f"{a!r} and {b!r}"
    return None if len(first) == len(second) else f"{len(first)} and {len(second)} lines"


def distance(one: Path, other: Path) -> float:
    """Return the largest relative distance of the parameters of steps."""
    largest = 0.0
    with numpy.load(one / "steps.npz") as first, numpy.load(other / "steps.npz") as second:
        if len(first.files) != len(second.files):
            return float("inf")
        for name in first.files:
            if first[name].shape != second[name].shape:
                return float("inf")
            scale = max(float(numpy.abs(first[name]).max(initial=0.0)), 1e-12)
            largest = max(largest, float(numpy.abs(first[name] - second[name]).max(initial=0.0)) / scale)
    return largest


def digest(folder: Path) -> str:
    """Return the SHA-256 of the steps and the text of a run."""
    sha = hashlib.sha256("\n".join(rounded((folder / "out").read_text())).encode())
    with numpy.load(folder / "steps.npz") as steps:
        for name in steps.files:
            sha.update(steps[name].tobytes())
    return sha.hexdigest()


class Comparison:
    """All runs of one script."""

    def __init__(self, script: Path, folder: Path, options: argparse.Namespace) -> None:
        self.script = script
        self.folder = folder
        self.options = options
        self._runs_in_double: dict[tuple[Any, ...], Path | None] = {}
        self.verdict = Verdict(script.stem)

    def run(self, name: str, processes: int, **options: Any) -> Path | None:
        """Run the script; return its folder, or None after a failure."""
        observed = Observed(self.script, self.folder / name, **options)
        failure = execute(observed, processes)
        if failure:
            self.verdict.problems.append(f"{name}: {failure.strip()[-1500:]}")
            return None
        return observed.folder

    def compare(self) -> Verdict:
        """Run and compare."""
        began = time.monotonic()
        numbers = self.options.numbers
        plain = self.run("plain", 1, is_plain=True)
        if plain is not None:
            self._compare_text(plain, numbers)
            if not self.options.quick:
                self._compare_double(numbers)
                self._compare_bits([number for number in numbers if number < 4])
        self.verdict.seconds = round(time.monotonic() - began, 1)
        return self.verdict

    def _compare_text(self, plain: Path, numbers: Sequence[int]) -> None:
        base = plain
        for number in numbers:
            run = self.run(f"on-{number}", number)
            if run is None:
                continue
            if number == 1 and json.loads((run / "calls.json").read_text()).get("draws"):
                base = run  # the data set draws: a function of the sample, on one process too
                self.verdict.note = "the data set draws: compared with one process"
            self._require_equal_text(f"on {number}", base, run, number)
            if number > 1:
                self._note_calls(run)
        if self.options.divides:
            self._compare_sharded(base)

    def _require_equal_text(self, name: str, base: Path, run: Path, number: int, strategy: str = "ddp") -> bool:
        other = different_line((base / "out").read_text(), (run / "out").read_text())
        if other is None:
            return True
        if self._is_equal_in_double(number, strategy):
            self.verdict.is_rounded = True
            return True
        self.verdict.problems.append(f"text {name}: {other}")
        return False

    def _compare_sharded(self, base: Path) -> None:
        """Run with divided parameters. What torch cannot do with them ends with its error."""
        observed = Observed(self.script, self.folder / "fsdp", strategy="fsdp")
        failure = execute(observed, 3)
        if failure:
            self.verdict.sharded = f"error: {_reason(failure)}"
        elif self._require_equal_text("with fsdp on 3", base, observed.folder, 3, "fsdp"):
            self.verdict.sharded = "equal"

    def _note_calls(self, run: Path) -> None:
        calls = json.loads((run / "calls.json").read_text())["calls"]
        self.verdict.divided = sum(one["divided"] for one in calls)
        self.verdict.whole = sum(one["whole"] for one in calls)
        self.verdict.reasons = list(dict.fromkeys(reason for one in calls for reason in one["reasons"]))

    def _is_equal_in_double(self, number: int, strategy: str) -> bool:
        """Whether text and steps are equal with float64: then rounding has changed a text, as by a ReLU or Adam."""
        base = self._in_double(1, is_plain=not self.verdict.note)
        run = self._in_double(number, strategy=strategy)
        if base is None or run is None or distance(base, run) > LIMIT_DOUBLE:
            return False
        return different_line((base / "out").read_text(), (run / "out").read_text()) is None

    def _in_double(self, number: int, **options: Any) -> Path | None:
        """Run the script with float64 as default type, once; return the folder, or None after a failure."""
        key = (number, *options.values())
        if key not in self._runs_in_double:
            name = "-".join(map(str, ("64", *key)))
            self._runs_in_double[key] = self.run(name, number, is_double=True, **options)
        return self._runs_in_double[key]

    def _compare_double(self, numbers: Sequence[int]) -> None:
        base = self._in_double(1, is_plain=not self.verdict.note)
        if base is None:
            return
        for number in (number for number in numbers if number > 1):
            run = self._in_double(number, strategy="ddp")
            if run is None:
                continue
            self.verdict.double = max(self.verdict.double or 0.0, distance(base, run))
        if self.verdict.double is not None and not self.verdict.double <= LIMIT_DOUBLE:
            self.verdict.problems.append(f"float64: steps differ by {self.verdict.double:.1e}")

    def _compare_bits(self, numbers: Sequence[int]) -> None:
        runs = [self.run(f"exact-{number}", number, reduction="exact") for number in numbers]
        digests = {digest(run) for run in runs if run is not None}
        if len(digests) > 1:
            self.verdict.problems.append("exact: other bits on other numbers of processes")


def page(verdicts: Sequence[Verdict], machine: dict[str, Any]) -> str:
    """Return the Markdown page of the verdicts."""
    rows = []
    for one in verdicts:
        double = "" if one.double is None else f"{one.double:.0e}"
        result = "wrong" if one.problems else "equal"
        rounded_note = "text depends on rounding" if one.is_rounded else ""
        notes = "; ".join([*filter(None, [one.note, rounded_note]), *one.reasons]).replace("|", "\\|")
        sharded = one.sharded.replace("|", "\\|")
        rows.append([one.script, result, one.kind, f"{one.divided} / {one.whole}", double, sharded, notes])
    header = ["script", "result", "calls", "divided / whole", "float64", "fsdp", "notes"]
    counts = {kind: sum(one.kind == kind for one in verdicts) for kind in ("divided", "mixed", "whole")}
    wrong = sum(bool(one.problems) for one in verdicts)
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        "# Unchanged scripts on 1 to 4 processes\n\n"
        "Written by `make scripts`. Each script of `tests/scripts` runs by plain Python, and unchanged on 1, 2, 3 and\n"
        "4 processes: text, parameters of the first 10 steps in float64, bits with `--exact` on 1, 2 and 3, and text\n"
        "with `--strategy fsdp` on 3.\n\n"
        f"{machine_line(machine)}\n\n{len(verdicts)} scripts: {total}; wrong: {wrong}.\n\n"
        f"{markdown_table(header, rows)}\n"
    )


def _others(file: Path, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of a file about other scripts."""
    names = {verdict.script for verdict in verdicts}
    before = json.loads(file.read_text(encoding="utf-8"))["scripts"] if file.exists() else []
    return [Verdict(**one) for one in before if one["script"] not in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="unchanged.runner", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of scripts; all if none")
    parser.add_argument("--processes", default="1,2,3,4", help="numbers of processes")
    parser.add_argument("--quick", action="store_true", help="compare the text only")
    parser.add_argument("--keep", type=Path, help="new folder for the files of the runs")
    parser.add_argument(
        "--result",
        type=Path,
        help="JSON file of the verdicts, with a page next to it; verdicts of other scripts in it stay",
    )
    options = parser.parse_args(arguments)
    options.numbers = [int(number) for number in options.processes.split(",")]
    options.divides = 3 in options.numbers
    scripts = sorted(SCRIPTS.glob("*.py"))
    if options.names:
        scripts = [script for script in scripts if script.stem in options.names]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="unchanged-"))
    machine = describe_machine()
    verdicts = []
    try:
        for script in scripts:
            verdict = Comparison(script, folder.resolve() / script.stem, options).compare()
            verdicts.append(verdict)
            state = "WRONG" if verdict.problems else "ok   "
            calls = f"{verdict.divided} divided, {verdict.whole} whole"
            notes = [verdict.note] if verdict.note else []
            print(
                f"{state} {verdict.script:34} {verdict.kind:8} {calls} {verdict.double} {notes + verdict.reasons} "
                f"{verdict.seconds} s",
                flush=True,
            )
            for problem in verdict.problems:
                print("      " + problem.replace("\n", "\n      "), flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)
    if options.result is not None:
        if options.names:
            verdicts += _others(options.result, verdicts)
        verdicts.sort(key=lambda verdict: verdict.script)
        save(options.result, {"machine": machine, "scripts": [vars(one) for one in verdicts]}, page(verdicts, machine))
    return 3 if any(verdict.problems for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
