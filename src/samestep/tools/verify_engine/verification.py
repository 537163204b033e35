"""Verification of one subject, and its certificate: JSON, a table for the terminal, and a self-contained HTML page.

Decisions: docs/decisions/proofs.md
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from samestep.errors import InputError
from samestep.launcher.launch import RankError
from samestep.loggers.logger import to_json
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.templates import render
from samestep.tools.verify_engine.attribution import Attribution
from samestep.tools.verify_engine.causes import Cause, Finding, additivity_finding, additivity_notes
from samestep.tools.verify_engine.compare import QUANTITIES, Comparison, compare, first_of
from samestep.tools.verify_engine.trials import Conditions, Record, Subject, TrialRunner
from samestep.units import plural

FORMAT = 3


def verify(
    subject: Subject,
    processes: Sequence[int],
    conditions: Conditions,
    folder: Path,
    *,
    kill_at: int | None = None,
    resume_on: int | None = None,
    checks_additivity: bool = True,
    preload: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the subject on each number of processes, compare with the first, and return the certificate as plain data.

    Args:
        subject: recipe or script.
        processes: numbers of processes; the first is the reference.
        conditions: settings of all trials.
        folder: parent of a temporary folder for trials.
        kill_at: repeat each run with a kill in this step and a resume on `resume_on` processes.
        resume_on: number of processes after the kill.
        checks_additivity: report a loss that depends on the division of a batch as a mistake.
        preload: modules that all ranks import.
        progress: called with a description before each run.

    Raises:
        RankError: the subject fails on the first number of processes.
        InputError: a script made no training step.
    """
    with TemporaryDirectory(prefix=".trials-", dir=folder) as trials:
        runner = TrialRunner(subject, conditions, Path(trials), preload=preload, progress=progress)
        reference = _run_reference(runner, processes[0], checks_additivity)
        others = [runner.run(number, reference) for number in processes[1:]] or [runner.repeat(reference)]
        if kill_at is not None:
            assert resume_on is not None
            others += [runner.run_killed(number, kill_at, resume_on, reference) for number in processes]
        comparisons = [compare(reference, other, conditions.tolerance) for other in others]
        findings = _attribute_first(runner, reference, others, comparisons)
        if not findings and subject.script is not None and max(processes) > 1:
            findings = check_orders(runner, max(processes), reference)
        notes = output_note(reference, others) + _rounding_note(others)
    if subject.recipe is not None and subject.recipe.strategy.gradient_note is not None:
        notes += (subject.recipe.strategy.gradient_note,)
    checks = reference.notes("additivity")
    finding = additivity_finding(checks)
    findings += [finding] if finding is not None else []
    notes += additivity_notes(checks) if checks_additivity else ("the additivity of the loss was not checked",)
    return {
        **_conditions_data(subject, conditions, reference, holds=not findings),
        "comparisons": [_comparison_data(comparison) for comparison in comparisons],
        "evaluation": [note["values"] for note in reference.notes("evaluation")],
        "findings": [finding.data() for finding in findings],
        "notes": list(notes),
        "environment": _environment(reference),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def output_note(reference: Record, others: Sequence[Record]) -> tuple[str, ...]:
    """Return a note on the first line that a script prints on rank 0 and that depends on the number of processes."""

    def output(record: Record) -> list[str]:
        file = record.folder / "output-0.log"
        return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []

    for other in others:
        pairs = zip(output(reference), output(other), strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if first is not None and not other.label and other.failure is None:
            return (
                f"rank 0 prints {first[0]!r} on {reference.processes} and {first[1]!r} on {other.processes} processes; "
                "values that the script computes without the engine are not verified",
            )
    return ()


def _rounding_note(others: Sequence[Record]) -> tuple[str, ...]:
    """Return a note on parameters whose updates are rounding that the optimizer scales to a full step."""
    steps = [step.main for other in others for step in other.steps.values()]
    names = {name.partition("/")[0]: None for step in steps for name in step["distances"].get("rounding", {})}
    if not names:
        return ()
    return (
        f"{', '.join(names)}: some elements have gradients of zero except for rounding, which the optimizer scales to "
        "a full step; these elements are not compared",
    )


def _run_reference(runner: TrialRunner, processes: int, checks_additivity: bool) -> Record:
    reference = runner.run(processes, checks_additivity=checks_additivity)
    if reference.failure is not None and reference.failure.kind != "UnusedParameterError":
        raise RankError(reference.failure)
    if reference.failure is None and not reference.steps:
        raise InputError(
            f"{runner.subject.name} made no step with samestep.Engine",
            expected="a script that trains with samestep.start, Engine and loader, and begins before its last step",
            fix="see docs/start/own-loop.md; pass {folder} as the folder of checkpoints without CheckpointManager",
            code="E_NOTHING_OBSERVED",
        )
    return reference


def _attribute_first(
    runner: TrialRunner, reference: Record, others: Sequence[Record], comparisons: Sequence[Comparison]
) -> list[Finding]:
    """Return the cause of the first comparison that fails; the other comparisons mostly fail for the same cause."""
    if reference.failure is not None:
        return [Attribution(runner, reference, reference).find(None)]
    for other, comparison in zip(others, comparisons, strict=True):
        first = comparison.first
        if first is not None and other.failure is not None and first.stage == "evaluation":
            first = None  # the run failed before its evaluations
        if first is not None or other.failure is not None:
            return [Attribution(runner, reference, other).find(first)]
    return []


def _conditions_data(subject: Subject, conditions: Conditions, reference: Record, holds: bool) -> dict[str, Any]:
    config, is_double = reference.config, conditions.interventions.double
    steps = [step.main for step in reference.steps.values()]
    return {
        "format": FORMAT,
        "holds": holds,
        "subject": subject.name,
        "arguments": list(subject.arguments),
        "recipe": recipe_data(subject.recipe) if subject.recipe is not None else None,
        "sources": next((note["sources"] for note in reference.notes("end")), {}),
        "reference": plural(reference.processes, "process"),
        "level": "bits" if conditions.tolerance is None else f"{conditions.tolerance:g} relative",
        "double": is_double,
        "reduction": config.get("reduction"),
        "batch_norm": config.get("batch_norm"),
        "precision": "float64" if is_double else config.get("precision"),
        "steps": [step["step"] for step in steps],
        "samples": sum(len(step["order"]) for step in steps),
        "microbatches": steps[0]["microbatches_of_batch"] if steps else None,
    }


def _environment(reference: Record) -> dict[str, Any]:
    return {
        "device": reference.engine.get("device"),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "samestep": version("samestep"),
        "threads": sorted({threads for step in reference.steps.values() for threads in step.threads}),
    }


def write_certificate(data: dict[str, Any], folder: Path) -> None:
    """Write `certificate.json` and `certificate.html`."""
    text = ""
    if data["recipe"] is not None:
        from samestep.recipes.yaml_text import to_yaml  # a package of the extra `recipes`

        text = to_yaml(data["recipe"])
    (folder / "certificate.json").write_text(to_json(data), encoding="utf-8")
    page = render("engine_certificate.html", **data, title=summary(data), recipe_text=text)
    (folder / "certificate.html").write_text(page, encoding="utf-8")


def summary(data: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    if data["holds"]:
        equality = "bit for bit" if data["level"] == "bits" else f"within {data['level']}"
        return f"holds: {len(data['comparisons']) + 1} runs computed the same, {equality}"
    causes = "; ".join(finding["cause"] for finding in data["findings"])
    return f"does not hold: {causes}"


def table(data: dict[str, Any]) -> str:
    """Return the verdicts with one line per quantity and one column per run."""
    runs = data["comparisons"]
    labels = [_short(run["processes"]) for run in runs]
    columns = [max(len(label), 9) + 2 for label in labels]
    width = max(len(name) for name in QUANTITIES.values()) + 2
    rows = {f"against {data['reference'].partition(' ')[0]}, on": labels}
    rows |= {name: [run["quantities"][name] for run in runs] for name in QUANTITIES.values()}
    return "\n".join(
        name.ljust(width) + "".join(cell.rjust(size) for cell, size in zip(cells, columns, strict=True))
        for name, cells in rows.items()
    )


def explanation(data: dict[str, Any]) -> str:
    """Return findings and notes as text."""
    lines = []
    for finding in data["findings"]:
        lines.append(f"cause: {finding['cause']}")
        if finding["where"]:
            lines.append(f"  first:    {finding['where']}")
        for number, evidence in enumerate(finding["evidence"]):
            lines.append(f"  {'evidence:' if number == 0 else '         '} {indent(evidence, ' ' * 12).strip()}")
        lines.append(f"  fix:      {finding['fix']}")
    lines += [f"note: {note}" for note in data["notes"]]
    return "\n".join(lines)


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    first_bit = first_of(comparison.differences)
    distances = {name: comparison.distance(key) for key, name in QUANTITIES.items()}
    return {
        "processes": comparison.label,
        "holds": comparison.first is None,
        "first_difference": first_bit.location if first_bit else None,
        "quantities": {name: comparison.verdict(key) for key, name in QUANTITIES.items()},
        "distances": {name: None if size is None else f"{size:.1e}" for name, size in distances.items()},
        "compared": {QUANTITIES[key]: number for key, number in comparison.compared.items()},
    }


def _short(label: str) -> str:
    """Return `3` for `3 processes`, and `2 > 4` for `2, killed in step 3, then 4`."""
    first, _, rest = label.partition(", killed in step ")
    return f"{first} > {rest.rpartition(' ')[2]}" if rest else first.partition(" ")[0]


def check_orders(runner: TrialRunner, processes: int, reference: Record) -> list[Finding]:
    """Return a finding if a script depends on the order of a set, or of the entries of a directory."""
    other = runner.run(processes, reference, other_orders=True)
    first = compare(reference, other, runner.conditions.tolerance).first
    if first is None and other.failure is None:
        return []
    seen = "results differ with another hash seed (PYTHONHASHSEED) and order of directory listings on each rank"
    text = [] if other.failure is None else [other.failure.text.removeprefix("error: ").splitlines()[0]]
    return [Finding(Cause.ARBITRARY_ORDER, first, (seen, *text))]
