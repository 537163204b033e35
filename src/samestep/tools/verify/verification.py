"""Verification of one subject, and its certificate: JSON, a table for the terminal, and HTML.

Decisions: docs/decisions/proofs.md
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from samestep.errors import InputError
from samestep.launcher.launch import RankError
from samestep.loggers.logger import to_json
from samestep.microbatches import require_microbatches
from samestep.recipes.recipe_files import recipe_data
from samestep.tools.templates import render
from samestep.tools.verify.attribution import Attribution
from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.compare import (
    QUANTITIES,
    TEXTS,
    Comparison,
    Tolerance,
    accepted,
    compare,
    first_of,
)
from samestep.tools.verify.texts import Printed
from samestep.tools.verify.trials import (
    PLAIN,
    Conditions,
    Record,
    Subject,
    TrialRunner,
    described,
)

FORMAT = 4

Plan = Callable[..., Record]  # from a reference, under changes of interventions


def verify(
    subject: Subject,
    processes: Sequence[int],
    conditions: Conditions,
    folder: Path,
    *,
    kill_at: int | None = None,
    resume_on: int | None = None,
    preload: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the subject on numbers of processes, compare with the first, and return a certificate.

    With `kill_at`, each run is repeated with a kill in this step and a resume on `resume_on`
    processes. Trials are written below `folder`. `progress` gets a description before each run.

    Raises:
        RankError: the subject fails on the first number of processes.
        InputError: a script made no training step, or its models are not divided, or by too few.
    """
    with TemporaryDirectory(prefix=".trials-", dir=folder) as trials:
        runner = TrialRunner(subject, conditions, Path(trials), preload=preload, progress=progress)
        reference = _run_reference(runner, processes[0])
        _require_microbatches(reference, max(*processes, resume_on or 1))
        tolerance = _measure_tolerance(runner, reference)
        remaining = processes if reference.processes == PLAIN else processes[1:]
        plans: list[Plan] = [partial(runner.run, number) for number in remaining] or [runner.repeat]
        if kill_at is not None:
            assert resume_on is not None
            plans += [partial(runner.run_killed, one, kill_at, resume_on) for one in processes]
        others = [plan(reference) for plan in plans]
        comparisons = _compare(runner, reference, others, tolerance)
        notes = list(others[-1].end.get("readings", []))
        if tolerance is not None and not conditions.interventions.double:
            notes += _accept_rounding(runner, reference.processes, plans, comparisons)
        findings: list[Finding] = []
        # The other comparisons mostly fail for the same cause as the first one.
        for other, comparison in zip(others, comparisons, strict=True):
            if not comparison.holds:
                attribution = Attribution(runner, reference, other, tolerance)
                findings = [attribution.find(comparison.first)]
                break
        else:
            notes += _rounding_note(others, tolerance)
        is_own_loop = subject.script is not None and not subject.is_unchanged
        if not findings and is_own_loop and max(processes) > 1:
            findings = _check_orders(runner, max(processes), reference, tolerance)
        runs = [run for run in (reference, *others) if not run.label and run.processes != PLAIN]
        return {
            "format": FORMAT,
            "holds": not findings,
            **_conditions_data(subject, conditions, reference, tolerance),
            "comparisons": [_comparison_data(comparison) for comparison in comparisons],
            "calls": {str(run.processes): list(run.end.get("summaries", [])) for run in runs},
            "findings": [finding.data(is_unchanged=subject.is_unchanged) for finding in findings],
            "notes": notes,
            "environment": _environment(runs[0]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def _run_reference(runner: TrialRunner, first: int) -> Record:
    """Run the reference.

    The reference of an unchanged script is plain Python, unless equal bits are required, or its
    data sets draw random numbers: those are a function of the index of a sample on any number of
    processes, one included.
    """
    if runner.subject.is_unchanged and not runner.conditions.requires_bits:
        plain = _require_steps(runner, runner.run(PLAIN))
        if not runner.run(first, plain).end.get("draws", False):
            return plain
    return _require_steps(runner, runner.run(first))


def _require_microbatches(reference: Record, processes: int) -> None:
    # Before the other runs, of which some would fail.
    for note in reference.modules:
        require_microbatches(note["options"].get("microbatches"), processes)


def _require_steps(runner: TrialRunner, reference: Record) -> Record:
    failure = reference.failure
    name = runner.subject.name
    has_own_group = failure is not None and failure.code == "E_OWN_GROUP"
    if failure is not None and not has_own_group:
        raise RankError(failure)
    problem = "does not use samestep.parallel"
    expected = "a script that gives its model to samestep.parallel"
    if runner.subject.is_unchanged:
        problem = "calls no module with parameters"
        expected = "a script for one process that trains a torch.nn.Module"
        if has_own_group:
            problem = "distributes its work itself"
    if has_own_group or not reference.modules:
        raise InputError(
            f"{name} {problem}",
            expected=expected,
            fix="samestep audit -- COMMAND for a script with DistributedDataParallel, such as "
            f"torchrun {name}",
            code="E_NOTHING_OBSERVED",
        )
    if not reference.steps:
        raise InputError(
            f"{name} made no step of an optimizer",
            expected="a script that trains with an optimizer of torch.optim, and begins before "
            "its last step",
            fix="see docs/start/own-loop.md; pass {folder} as the folder of checkpoints without "
            "CheckpointManager",
            code="E_NOTHING_OBSERVED",
        )
    return reference


def _measure_tolerance(runner: TrialRunner, reference: Record) -> Tolerance | None:
    """Return the tolerance of rounding; None if equal bits are required."""
    requires_bits = runner.conditions.requires_bits
    if requires_bits or (requires_bits is None and reference.is_exact):
        return None
    perturbed = runner.run(reference.processes, reference, perturbed=True)
    return Tolerance.of(reference, perturbed.completed())


def _compare(
    runner: TrialRunner, reference: Record, others: Sequence[Record], tolerance: Tolerance | None
) -> list[Comparison]:
    """Compare the runs, without printed numbers that differ between two equal runs."""
    perturbed = reference.texts
    if tolerance is not None:
        perturbed = runner.run(reference.processes, reference, perturbed=True).completed().texts
    printed = _printed(reference, perturbed)
    comparisons = [compare(reference, other, tolerance, printed) for other in others]
    if all(one.verdict(text) != "differs" for one in comparisons for text in TEXTS):
        return comparisons
    repeated = runner.repeat(reference).completed().texts
    # Numbers that vary between equal runs by more than rounding, such as times, count as varying in
    # both.
    varying = {
        text: [
            one if one != line else two
            for line, one, two in zip(lines, repeated[text], perturbed[text], strict=False)
        ]
        for text, lines in reference.texts.items()
    }
    printed = _printed(reference, varying)
    return [compare(reference, other, tolerance, printed) for other in others]


def _printed(reference: Record, repeated: Mapping[str, Sequence[str]]) -> dict[str, Printed]:
    return {text: Printed(lines, repeated[text]) for text, lines in reference.texts.items()}


def _accept_rounding(
    runner: TrialRunner, processes: int, plans: Sequence[Plan], comparisons: list[Comparison]
) -> list[str]:
    """Accept differences beyond the tolerance that are rounding in float64, and note them."""
    notes = []
    for number, (plan, comparison) in enumerate(zip(plans, comparisons, strict=True)):
        first = comparison.first
        # Ranks of one run are compared bit for bit: between them, rounding is no excuse.
        is_measured = all(one.distance is not None and not one.ranks for one in comparison.failing)
        if first is None or comparison.has_failed or not is_measured:
            continue
        reference = runner.run(processes, double=True)
        perturbed = runner.run(processes, reference, double=True, perturbed=True)
        tolerance = Tolerance.of(reference, perturbed)
        printed = _printed(reference, perturbed.texts)
        exact = compare(reference, plan(reference, double=True), tolerance, printed)
        comparisons[number] = accepted(comparison, exact)
        if comparisons[number] is not comparison:
            size = max((one.distance or 0.0 for one in exact.differences), default=0.0)
            notes.append(
                f"{comparison.label}: beyond the tolerance from {first.location}; in float64 all "
                f"differences are at most {size:.1e}, so this is rounding, which decides otherwise "
                "somewhere, as in a ReLU"
            )
    return notes


def _check_orders(
    runner: TrialRunner, processes: int, reference: Record, tolerance: Tolerance | None
) -> list[Finding]:
    """Return a finding if results depend on the order of a set, or of a directory's entries."""
    other = runner.run(processes, reference, other_orders=True)
    comparison = compare(reference, other, tolerance)
    if comparison.first is not None and tolerance is not None and processes != reference.processes:
        # Rounding that was accepted has the same bits again.
        comparison = compare(runner.run(processes, reference), other, None)
    if comparison.holds:
        return []
    evidence = [
        "results differ with another hash seed (PYTHONHASHSEED) and order of directory listings on "
        "each rank"
    ]
    if other.failure is not None:
        evidence.append(other.failure.text.removeprefix("error: ").splitlines()[0])
    return [Finding(Cause.ARBITRARY_ORDER, comparison.first, tuple(evidence))]


def _rounding_note(others: Sequence[Record], tolerance: Tolerance | None) -> list[str]:
    """Return a note on parameters whose updates are rounding that the optimizer scales up."""
    names: dict[str, None] = {}
    for other in others:
        for step, notes in other.steps.items():
            for name, size in notes[0]["distances"].get("rounding", {}).items():
                if tolerance is not None and size > tolerance.at("weights", step):
                    names[name.partition("/")[0]] = None
    if not names:
        return []
    return [
        f"{', '.join(names)}: some elements have gradients of zero except for rounding, which the "
        "optimizer scales to a full step; these elements are not compared"
    ]


# --- certificate --------------------------------------------------------------------------------


def _conditions_data(
    subject: Subject, conditions: Conditions, reference: Record, tolerance: Tolerance | None
) -> dict[str, Any]:
    batches = [one for notes in reference.steps.values() for one in notes[0]["batches"]]
    return {
        "subject": subject.name,
        "arguments": list(subject.arguments),
        "recipe": recipe_data(subject.recipe) if subject.recipe is not None else None,
        "sources": reference.end.get("sources", {}),
        "reference": described(reference.processes),
        "level": "bits" if tolerance is None else "rounding",
        "tolerances": {} if tolerance is None else tolerance.data(),
        "double": conditions.interventions.double,
        "modules": [{"name": note["name"], **note["options"]} for note in reference.modules],
        "steps": list(reference.steps),
        "samples": sum(batch["size"] for batch in batches if not batch["evaluation"]),
    }


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    first_bit = first_of(comparison.differences)
    distances: dict[str, str | None] = {}
    for key, name in QUANTITIES.items():
        size = comparison.distance(key)
        distances[name] = None if size is None else f"{size:.1e}"
    return {
        "processes": comparison.label,
        "holds": comparison.holds,
        "first_difference": first_bit.location if first_bit else None,
        "quantities": {name: comparison.verdict(key) for key, name in QUANTITIES.items()},
        "distances": distances,
        "compared": {QUANTITIES[key]: number for key, number in comparison.compared.items()},
    }


def _environment(reference: Record) -> dict[str, Any]:
    threads = {note["threads"] for notes in reference.steps.values() for note in notes}
    return {
        "device": reference.end.get("device"),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "samestep": version("samestep"),
        "threads": sorted(threads),
    }


def write_certificate(data: dict[str, Any], folder: Path) -> None:
    """Write `certificate.json` and `certificate.html`."""
    text = ""
    if data["recipe"] is not None:
        from samestep.recipes.yaml_text import to_yaml  # a package of the extra `recipes`

        text = to_yaml(data["recipe"])
    (folder / "certificate.json").write_text(to_json(data), encoding="utf-8")
    page = render("certificate.html", **data, title=summary(data), recipe_text=text)
    (folder / "certificate.html").write_text(page, encoding="utf-8")


def summary(data: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    if data["holds"]:
        equality = {"bits": "bit for bit", "rounding": "within rounding"}[data["level"]]
        return f"holds: {len(data['comparisons']) + 1} runs computed the same, {equality}"
    causes = "; ".join(finding["cause"] for finding in data["findings"])
    return f"does not hold: {causes}"


def table(data: dict[str, Any]) -> str:
    """Return a line per quantity and a column of verdicts per run; the last one is the tolerance.

    A row of files is present only if some run has written files.
    """
    runs = data["comparisons"]
    labels = []
    for run in runs:  # `3` for `3 processes`, and `2 > 4` for `2, killed in step 3, then 4`
        first, _, rest = run["processes"].partition(", killed in step ")
        if rest:
            labels.append(f"{first} > {rest.rpartition(' ')[2]}")
        else:
            labels.append(first.partition(" ")[0])
    files = QUANTITIES["files"]
    is_written = any(run["quantities"][files] not in ("-", "failed") for run in runs)
    names = [name for key, name in QUANTITIES.items() if key != "files" or is_written]
    rows = {f"against {data['reference'].partition(' ')[0]}, on": labels}
    rows |= {name: [run["quantities"][name] for run in runs] for name in names}
    if data["tolerances"]:
        labels.append("at most")
        for name in names:
            rows[name].append(data["tolerances"].get(name, ""))
    widths = [max(len(label), 9) + 2 for label in labels]
    width = max(map(len, rows)) + 2
    lines = []
    for name, cells in rows.items():
        columns = (cell.rjust(size) for cell, size in zip(cells, widths, strict=True))
        lines.append((name.ljust(width) + "".join(columns)).rstrip())
    return "\n".join(lines)


def calls_text(data: dict[str, Any]) -> str:
    """Return a line per module and number of processes: divided calls, and why others were not."""
    lines = []
    for processes, modules in data["calls"].items():
        for module in modules:
            text = f"{module['divided']} divided, {module['watched'] + module['whole']} whole"
            if module["watched"]:
                text = f"{text} ({module['watched']} of them the first of a kind)"
            if module["reasons"]:
                text = f"{text}: {'; '.join(module['reasons'])}"
            lines.append(f"calls of {module['module']} on {processes}: {text}")
    return "\n".join(lines)


def explanation(data: dict[str, Any]) -> str:
    """Return findings and notes as text."""
    lines = []
    for finding in data["findings"]:
        lines.append(f"cause: {finding['cause']}")
        if finding["where"]:
            lines.append(f"  first:    {finding['where']}")
        title = "evidence:"
        for evidence in finding["evidence"]:
            lines.append(f"  {title:<9} {indent(evidence, ' ' * 12).strip()}")
            title = ""
        lines.append(f"  fix:      {finding['fix']}")
    lines += [f"note: {note}" for note in data["notes"]]
    return "\n".join(lines)
