"""Verdict of a run: its numbers against those of plain Python, and its summary against the expectation."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from plain_loop.forks import Outcome, Run
from plain_loop.script import Script

ERROR_LINES = 12


@dataclass
class Verdict:
    """Result of one script on one number of processes.

    Attributes:
        script: name of the script.
        processes: number of processes; 0 for a second run of plain Python.
        outcome: `equal`, `different`, `error E_CODE`, `hang`, `failed`, `skipped` or `vary`.
        kind: `divided`, `whole`, `mixed`, or empty if there is no summary.
        divided: number of divided calls of rank 0.
        whole: number of whole calls of rank 0.
        reasons: reasons for whole calls.
        deviation: largest difference to the numbers of plain Python, relative to the largest number of its line.
        problem: difference from the expectation; empty if the run is right.
        seconds: duration of the run.
    """

    script: str
    processes: int
    outcome: str
    kind: str = ""
    divided: int = 0
    whole: int = 0
    reasons: list[str] = field(default_factory=list)
    deviation: float | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.problem

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return {**asdict(self), "passed": self.passed}

    def as_short_json(self) -> dict[str, Any]:
        """Return the fields that are not empty; those of an earlier run stay equal but for deviations."""
        fields = asdict(self)
        del fields["seconds"]
        return {name: value for name, value in fields.items() if value or name == "processes"}


def deviation(expected: list[str], printed: list[str]) -> float | str:
    """Return the largest relative deviation of the numbers of the lines, or why they cannot be compared.

    Each difference is divided by the largest number of its line. Lines of digests are not compared.
    """
    expected = [line for line in expected if line.startswith("R ")]
    printed = [line for line in printed if line.startswith("R ")]
    if not expected:
        return "the plain loop printed no numbers"
    if len(expected) != len(printed):
        return f"{len(printed)} lines of numbers instead of {len(expected)}"
    largest = 0.0
    for row, (line, other) in enumerate(zip(expected, printed, strict=True)):
        numbers = [float(text) for text in line.split()[1:]]
        others = [float(text) for text in other.split()[1:]]
        if len(numbers) != len(others):
            return f"{len(others)} numbers instead of {len(numbers)} in line {row}"
        scale = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
        for number, value in zip(numbers, others, strict=True):
            if number == value or (math.isnan(number) and math.isnan(value)):
                continue
            difference = abs(number - value) / (scale or 1.0)
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def judge(script: Script, plain: list[str], tolerance: float, run: Run) -> Verdict:
    """Return the verdict of a run that has ended.

    Args:
        script: the script.
        plain: lines that plain Python printed.
        tolerance: relative tolerance of the numbers on several processes.
        run: the run.
    """
    outcomes = run.outcomes()
    verdict = Verdict(script.name, run.processes, "equal", seconds=run.seconds)
    _read_summary(verdict, outcomes[0])
    if run.hung:
        verdict.outcome = "hang"
        verdict.problem = f"hang: {_errors(outcomes)}"
    elif any(outcome.code for outcome in outcomes):
        _judge_failure(script, plain, tolerance, outcomes, verdict)
    elif script.expected == "error" and run.processes > 1:
        verdict.outcome = "no error"
        verdict.problem = f"no error {script.words}"
    else:
        _judge_numbers(script, plain, tolerance, outcomes, verdict)
    if verdict.passed and run.processes > 1:
        verdict.problem = _unexpected(script, verdict)
    return verdict


def _read_summary(verdict: Verdict, outcome: Outcome) -> None:
    verdict.divided = sum(module["divided"] for module in outcome.summary)
    verdict.whole = sum(module["whole"] for module in outcome.summary)
    for module in outcome.summary:
        verdict.reasons += [reason for reason in module["reasons"] if reason not in verdict.reasons]
    if verdict.divided and verdict.reasons:
        verdict.kind = "mixed"
    elif verdict.divided:
        verdict.kind = "divided"
    elif verdict.whole or verdict.reasons:
        verdict.kind = "whole"


def _judge_failure(
    script: Script, plain: list[str], tolerance: float, outcomes: list[Outcome], verdict: Verdict
) -> None:
    """A rank ended with an error: right if it is the expected one, on all ranks, with no other number before it."""
    texts = [f"{outcome.error} {outcome.errors}" for outcome in outcomes]
    codes = list(script.allowed)
    if script.expected == "error":
        codes += script.words.split()
    if verdict.processes <= 1:
        codes = []
    found = [code for code in codes if any(re.search(rf"\b{code}\b", text) for text in texts)]
    errors = sorted({outcome.error or f"exit code {outcome.code}" for outcome in outcomes if outcome.code})
    verdict.outcome = f"error {' '.join(found or errors)}"
    if not found:
        verdict.problem = f"failed: {_errors(outcomes)}"
    elif not all(
        outcome.code or any(re.search(rf"\b{code}\b", text) for code in found)
        for outcome, text in zip(outcomes, texts, strict=True)
    ):
        # One rank reports the error for all. A rank at the end of its script has the exit code of the script.
        verdict.problem = f"ranks without an error: codes {[outcome.code for outcome in outcomes]}"
    elif not script.numbers_vary:
        for outcome in outcomes:
            numbers = [line for line in outcome.lines if line.startswith("R ")]
            first = [line for line in plain if line.startswith("R ")][: len(numbers)]
            distance = deviation(first, numbers)
            if numbers and not (isinstance(distance, float) and distance <= tolerance):
                verdict.problem = "other numbers before the error"


def _judge_numbers(
    script: Script, plain: list[str], tolerance: float, outcomes: list[Outcome], verdict: Verdict
) -> None:
    printed = outcomes[0].lines
    for rank, outcome in enumerate(outcomes[1:], 1):
        if outcome.lines != printed:
            verdict.outcome = "different"
            verdict.problem = f"rank {rank} printed other numbers than rank 0 ({deviation(printed, outcome.lines)})"
            return
    if script.numbers_vary:
        verdict.outcome = "vary"
        return
    found = deviation(plain, printed)
    if isinstance(found, str):
        verdict.outcome = "different"
        verdict.problem = found
        return
    verdict.deviation = found
    if verdict.processes <= 1 and printed != plain:
        verdict.outcome = "different"
        verdict.problem = f"not the bits of plain Python (numbers differ by {found:.1e})"
    elif not found <= tolerance:
        verdict.outcome = "different"
        verdict.problem = f"numbers differ by {found:.1e}, more than {tolerance:.1e}"


def _unexpected(script: Script, verdict: Verdict) -> str:
    """Return how the summary differs from the expectation; empty if it does not."""
    if script.expected == "error" or verdict.outcome.startswith("error"):
        return ""
    if verdict.kind != script.expected:
        reasons = "; ".join(verdict.reasons) or "no reason"
        return f"{verdict.kind or 'no summary'} instead of {script.expected} ({reasons})"
    choices = [words.strip() for words in script.words.lower().split("|") if words.strip()]
    if choices and not any(words in reason.lower() for words in choices for reason in verdict.reasons):
        return f"no reason with the words {script.words!r}: {'; '.join(verdict.reasons) or 'no reason'}"
    return ""


def _errors(outcomes: list[Outcome]) -> str:
    """Return the last lines of the error stream of the first rank that failed."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.code > 0] or [0]
    lines = [line for line in outcomes[failed[0]].errors.splitlines() if line.strip()]
    codes = [outcome.code for outcome in outcomes]
    return f"exit codes {codes}, rank {failed[0]}:\n" + "\n".join(lines[-ERROR_LINES:])
