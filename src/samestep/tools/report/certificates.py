"""The certificate that `samestep verify` wrote, as a report shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.tools.verify.certificate import FORMAT, summary

FILE = "certificate.json"


@dataclass(frozen=True)
class Certificate:
    """One certificate.

    Attributes:
        path: of its file.
        holds: whether all runs computed the same.
        sentence: its result.
        runs: what the reference was compared with.
        rows: a quantity, and what came of it in each run.
        facts: under which conditions, by name.
        findings: causes, each with `where`, `evidence` and `do`.
    """

    path: Path
    holds: bool
    sentence: str
    reference: str
    runs: list[str]
    rows: list[tuple[str, list[str]]]
    facts: dict[str, str]
    findings: list[dict[str, Any]]
    notes: list[str]


def find_certificates(run: Path) -> list[Path]:
    """Folders with a certificate in a run's folder: itself, or one in it."""
    return [path.parent for path in sorted([*run.glob(FILE), *run.glob(f"*/{FILE}")])]


def read_certificate(folder: Path) -> Certificate:
    """The certificate in `folder`.

    Raises:
        InputError: there is none, or it is damaged or of another version.
    """
    path = folder / FILE
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return _certificate(path, data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} cannot be read: {what}",
            rule=f"a folder that `samestep verify --out` wrote, with {FILE} in it",
            do="name that folder, or verify again",
        ) from error


def _certificate(path: Path, data: dict[str, Any]) -> Certificate:
    runs, findings = data["comparisons"], data["findings"]
    quantities = list(runs[0]["quantities"]) if runs else []
    return Certificate(
        path,
        holds=bool(data["holds"]),
        sentence=summary(data),
        reference=str(data["reference"]),
        runs=[str(run["processes"]) for run in runs],
        rows=[(name, [_cell(run, name) for run in runs]) for name in quantities],
        facts=_facts(data),
        findings=[{key: finding[key] for key in ("cause", "where", "evidence", "do")} for finding in findings],
        notes=[str(note) for note in data["notes"]],
    )


def _cell(run: dict[str, Any], name: str) -> str:
    verdict, distance = str(run["quantities"][name]), run["distances"][name]
    return f"{verdict} by {distance}" if verdict == "differs" and distance else verdict


def _facts(data: dict[str, Any]) -> dict[str, str]:
    steps, environment = data["steps"], data["environment"]
    return {
        "what": " ".join([str(data["subject"]), *map(str, data["arguments"])]),
        "asked for": str(data["level"]),
        "steps": ", ".join(map(str, steps)),
        "samples": f"{data['samples']} in {data['shards']} shards a batch",
        "arithmetic": f"{data['precision']}, reduction {data['reduction']}, batch norm {data['batch_norm']}",
        "device": str(environment["device"]),
        "torch": str(environment["torch"]),
        "time": str(data["time"]),
    }
