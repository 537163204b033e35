"""One verification: the runs, their comparison, and the causes of what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from samestep.errors import InputError
from samestep.runtime.launch import RankError
from samestep.tools.verify.attribute import attribute
from samestep.tools.verify.causes import Finding
from samestep.tools.verify.compare import compare
from samestep.tools.verify.cuts import cut_finding, cut_notes
from samestep.tools.verify.difference import Comparison
from samestep.tools.verify.lab import Conditions, Lab
from samestep.tools.verify.plan import Subject
from samestep.tools.verify.printed import printed_note
from samestep.tools.verify.record import Record


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        comparisons: each further number of processes against the first.
        findings: the causes of what does not hold; empty where all holds.
        notes: what was not looked at, and why.
    """

    subject: Subject
    conditions: Conditions
    reference: Record
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every run computed what the first one did, and the loss adds up."""
        return not self.findings


def verify(
    subject: Subject,
    processes: Sequence[int],
    conditions: Conditions,
    folder: Path,
    *,
    kill_at: int | None = None,
    resume_on: int | None = None,
    checks_losses: bool = True,
    preload: tuple[str, ...] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run the subject on each number of processes and compare with the first.

    Args:
        folder: trials write into a folder of their own in it, which is removed at the end.
        kill_at: each number is also killed in this step and gone on with on `resume_on` processes.
        checks_losses: a loss that depends on how a batch is cut counts as a mistake.
        tell: hears what is run next.

    Raises:
        RankError: the subject fails on the first number of processes.
        InputError: a script made no engine.
    """
    with TemporaryDirectory(prefix=".trials-", dir=folder) as trials:
        lab = Lab(subject, conditions, Path(trials), preload=preload, tell=tell)
        reference = _reference(lab, processes[0], checks_losses)
        others = [lab.trial(number, reference=reference) for number in processes[1:]] or [lab.again(reference)]
        if kill_at is not None:
            assert resume_on is not None
            others += [lab.killed(number, kill_at, resume_on, reference) for number in processes]
        comparisons = tuple(compare(reference, other, conditions.tolerance) for other in others)
        findings = _findings(lab, reference, others, comparisons)
        notes = printed_note(reference, others)
    if subject.recipe is not None and subject.recipe.strategy.remark is not None:
        notes += (subject.recipe.strategy.remark,)
    cuts = reference.noted("additivity")
    found = cut_finding(cuts)
    findings += [found] if found is not None else []
    notes += cut_notes(cuts) if checks_losses else ("whether the loss is the sum of its pieces was not looked at",)
    return Verification(subject, conditions, reference, comparisons, tuple(findings), notes)


def _reference(lab: Lab, processes: int, checks_losses: bool) -> Record:
    reference = lab.trial(processes, cuts_losses=checks_losses)
    if reference.failure is not None and reference.failure.kind != "UnusedParameterError":
        raise RankError(reference.failure)
    if reference.failure is None and not reference.steps:
        raise InputError(
            f"{lab.subject.name} made no step with samestep.Engine",
            rule="what is verified is what the engine does: samestep.start, Engine and loader",
            do="see docs/own-loop.md",
        )
    return reference


def _findings(
    lab: Lab, reference: Record, others: Sequence[Record], comparisons: Sequence[Comparison]
) -> list[Finding]:
    """The cause of the first comparison that fails; the others mostly fail for the same one."""
    if reference.failure is not None:
        return [attribute(lab, reference, reference, None)]
    for other, comparison in zip(others, comparisons, strict=True):
        first = comparison.first
        if first is not None and other.failure is not None and first.stage == "evaluation":
            first = None  # it did not get there
        if first is not None or other.failure is not None:
            return [attribute(lab, reference, other, first)]
    return []
