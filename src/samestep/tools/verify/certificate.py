"""The certificate: a table for the terminal, JSON for programs, and a page of HTML that needs nothing else."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import Any

from samestep.record.events import several_lines
from samestep.tools.verify.causes import where
from samestep.tools.verify.difference import QUANTITIES
from samestep.tools.verify.plan import in_words
from samestep.tools.verify.verification import Verification

FORMAT = 1


def certificate_data(verification: Verification) -> dict[str, Any]:
    """Everything that the certificate says, as plain data."""
    reference, conditions = verification.reference, verification.conditions
    engine, rules = reference.engine, reference.rules
    steps = [step.main for step in reference.steps.values()]
    return {
        "format": FORMAT,
        "holds": verification.holds,
        "subject": verification.subject.name,
        "arguments": list(verification.subject.arguments),
        "reference": in_words(reference.processes),
        "level": "bits" if conditions.tolerance is None else f"{conditions.tolerance:g} relative",
        "double": conditions.held.double,
        "reduction": rules.get("reduction"),
        "batch_norm": rules.get("batch_norm"),
        "precision": "float64" if conditions.held.double else rules.get("precision"),
        "steps": [step["step"] for step in steps],
        "samples": sum(len(step["order"]) for step in steps),
        "shards": steps[0]["shards_of_batch"] if steps else None,
        "comparisons": [
            {
                "processes": comparison.label,
                "holds": comparison.first is None,
                "first_difference": where(comparison.seen) if comparison.seen else None,
                "quantities": {words: comparison.verdict(key) for key, words in QUANTITIES.items()},
                "distances": {words: _shown(comparison.distance(key)) for key, words in QUANTITIES.items()},
                "compared": {QUANTITIES[key]: number for key, number in comparison.compared.items()},
            }
            for comparison in verification.comparisons
        ],
        "evaluation": [note["values"] for note in reference.evaluations],
        "findings": [finding.data() for finding in verification.findings],
        "notes": list(verification.notes),
        "environment": {
            "device": engine.get("device"),
            "machine": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "samestep": version("samestep"),
            "threads": sorted({threads for step in reference.steps.values() for threads in step.threads}),
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_certificate(data: dict[str, Any], folder: Path) -> None:
    """`certificate.json` and `certificate.html` in `folder`."""
    from jinja2 import Environment, StrictUndefined

    (folder / "certificate.json").write_text(several_lines(data), encoding="utf-8")
    template = files("samestep.tools.verify").joinpath("certificate.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(template)
    (folder / "certificate.html").write_text(page.render(**data, title=summary(data)), encoding="utf-8")


def summary(data: dict[str, Any]) -> str:
    """The result in one sentence."""
    runs = [comparison["processes"] for comparison in data["comparisons"]]
    if data["holds"]:
        how = "bit for bit" if data["level"] == "bits" else f"within {data['level']}"
        return f"holds: {len(runs) + 1} runs computed the same, {how}"
    causes = "; ".join(finding["cause"] for finding in data["findings"])
    return f"does not hold: {causes}"


def table(data: dict[str, Any]) -> str:
    """What was compared, a line a quantity and a column a run."""
    runs = data["comparisons"]
    labels = [_short(run["processes"]) for run in runs]
    width = max(len(words) for words in QUANTITIES.values()) + 2
    columns = [max(len(label), 9) + 2 for label in labels]
    head = f"against {data['reference'].partition(' ')[0]}, on".ljust(width)
    lines = [head + "".join(label.rjust(size) for label, size in zip(labels, columns, strict=True))]
    for words in QUANTITIES.values():
        cells = [run["quantities"][words] for run in runs]
        lines.append(words.ljust(width) + "".join(cell.rjust(size) for cell, size in zip(cells, columns, strict=True)))
    return "\n".join(lines)


def explanation(data: dict[str, Any]) -> str:
    """Causes with their evidence, as text."""
    lines = []
    for finding in data["findings"]:
        lines.append(f"cause: {finding['cause']}")
        if finding["where"]:
            lines.append(f"  first:    {finding['where']}")
        for number, evidence in enumerate(finding["evidence"]):
            lines.append(f"  {'evidence:' if number == 0 else '         '} {indent(evidence, ' ' * 12).strip()}")
        lines.append(f"  do:       {finding['do']}")
    lines += [f"note: {note}" for note in data["notes"]]
    return "\n".join(lines)


def _shown(distance: float | None) -> str | None:
    return None if distance is None else f"{distance:.1e}"


def _short(label: str) -> str:
    """`3 processes` as `3`, and `2, killed in step 3, then 4` as `2 > 4`."""
    first, _, rest = label.partition(", killed in step ")
    return f"{first} > {rest.rpartition(' ')[2]}" if rest else first.partition(" ")[0]
