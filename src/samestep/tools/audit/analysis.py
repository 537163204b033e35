"""Analysis of the events of an audit, and its report.

Decisions: docs/decisions/proofs.md
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding

from samestep.tools.audit.events import read_events
from samestep.tools.audit.file_findings import checkpoint_findings, file_findings
from samestep.tools.audit.findings import Finding, data_findings, plural, step_findings
from samestep.tools.audit.worlds import World, group_worlds


@dataclass(frozen=True)
class WorldAnalysis:
    """Findings of one world, and the extent of its observation."""

    program: str
    ranks: int
    steps: int  # optimizer steps
    findings: list[Finding]


@dataclass(frozen=True)
class Analysis:
    """Result of an audit."""

    worlds: list[WorldAnalysis]
    failures: list[str]  # observers that failed, with the error

    @property
    def findings(self) -> list[Finding]:
        """The findings of all worlds."""
        return [finding for world in self.worlds for finding in world.findings]


def analyse(folder: Path) -> Analysis:
    """Return the findings in the events of a folder, for each world that trained or loaded data."""
    processes = list(read_events(folder))
    worlds = [world for world in group_worlds(processes) if world.events("update")[0] or world.events("pass")[0]]
    failures = [f"{e['observer']}: {e['error']}" for events in processes for e in events if e["kind"] == "failure"]
    return Analysis([_analysis(world, worlds) for world in worlds], list(dict.fromkeys(failures)))


def _analysis(world: World, worlds: list[World]) -> WorldAnalysis:
    steps = max((event.get("step", 0) + (event["kind"] == "update") for event in world.ranks[0]), default=0)
    others = [other for other in worlds if other is not world]
    findings = _merged(
        (*step_findings(world), *file_findings(world), *data_findings(world), *checkpoint_findings(world, others))
    )
    return WorldAnalysis(world.program, world.size, steps, findings)


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each name and line: later epochs repeat it."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.name, finding.line), finding)
    return list(first.values())


def print_report(analysis: Analysis) -> None:
    """Print the findings of each world, and what was observed."""
    console = Console(markup=False, highlight=False, soft_wrap=False)
    for world in analysis.worlds:
        for finding in world.findings:
            console.print(f"{finding.name}  {finding.line or world.program}", soft_wrap=True)
            console.print(Padding(finding.evidence, (0, 0, 0, 4)))
        count = plural(len(world.findings), "finding")
        print(f"{world.program}: {count}; {plural(world.ranks, 'rank')}, {plural(world.steps, 'optimizer step')}")
    for failure in analysis.failures:
        print(f"not observed: {failure}")
