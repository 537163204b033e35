"""Trial of a script with another order of sets and of directory listings on each rank."""

from __future__ import annotations

from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.compare import compare
from samestep.tools.verify.trials import Record, TrialRunner


def check_orders(runner: TrialRunner, processes: int, reference: Record) -> list[Finding]:
    """Return a finding if a script depends on the order of a set, or of the entries of a directory."""
    other = runner.run(processes, reference, other_orders=True)
    first = compare(reference, other, runner.conditions.tolerance).first
    if first is None and other.failure is None:
        return []
    seen = "results differ with another hash seed (PYTHONHASHSEED) and order of directory listings on each rank"
    text = [] if other.failure is None else [other.failure.text.removeprefix("error: ").splitlines()[0]]
    return [Finding(Cause.ARBITRARY_ORDER, first, (seen, *text))]
