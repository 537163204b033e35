"""A zip for a bug report: what was found and what it was judged by, without anything private."""

from __future__ import annotations

import json
import platform
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.tools.doctor.facts import Facts
from samestep.tools.doctor.finding import Finding
from samestep.tools.doctor.private import harmless_variables, read_private

_ABOUT = """\
Written by `samestep doctor --bundle`, to go with a bug report.

findings.json  every line of the report
facts.json     what they are judged by: versions, processors, memory, limits, GPUs, variables

Left out or replaced: names of users and machines, paths, addresses, what looks like a token, and the values of
variables save a short list of harmless ones. Look through both files before you send them all the same.
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_bundle(path: Path, facts: Facts, findings: Sequence[Finding]) -> None:
    """Write it.

    Raises:
        InputError: it cannot be written there.
    """
    private = read_private(_of_facts(facts))
    files = {
        "README.txt": _ABOUT,
        "findings.json": _json(private.without([asdict(finding) for finding in findings])),
        "facts.json": _json({**private.without(_told(facts)), "variables": harmless_variables(facts.variables)}),
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}",
            rule="--bundle FILE, in a folder that is there",
            do="--bundle report.zip",
        ) from error


def _of_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """What is private in the facts, beside what every report must not hold."""
    runs = facts.plan.runs
    yield from ((text, "<runs>") for text in (str(runs.absolute()), str(runs), runs.name) if text not in ("runs", "."))
    yield facts.network.host, "<host>"
    if facts.meeting is not None:
        yield facts.meeting.address, "<host>"
    yield from ((card.uuid, "<gpu>") for card in facts.nvidia.cards)


def _told(facts: Facts) -> dict[str, Any]:
    """The facts that say something to others."""
    plan = asdict(facts.plan)
    del plan["runs"]
    test = facts.self_test
    kernel = re.match(r"[\d.]+", platform.release())
    return {
        "system": {"name": platform.system(), "kernel": kernel[0] if kernel else "", "machine": platform.machine()},
        "plan": plan,
        "versions": asdict(facts.versions),
        "nvidia": {
            "driver": facts.nvidia.driver,
            "cards": [{**asdict(card), "uuid": "<gpu>"} for card in facts.nvidia.cards],
            "links": facts.nvidia.links,
            "failed": facts.nvidia.failed,
        },
        "processors": asdict(facts.processors),
        "memory": asdict(facts.memory),
        "limits": asdict(facts.limits),
        "folder": {name: value for name, value in asdict(facts.folder).items() if name != "path"},
        "clock": {"elapsed": facts.clock.elapsed, "monotonic": facts.clock.monotonic},
        "self_test": asdict(test) if test is not None else None,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"
