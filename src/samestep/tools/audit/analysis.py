"""Analysis of the events of an audit, findings about files, and its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding

from samestep.tools.audit.events import read_events
from samestep.tools.audit.findings import Finding, data_findings, step_findings
from samestep.tools.audit.worlds import Pass, World, group_worlds, passes
from samestep.units import plural

_PATHS = 3  # of files in one finding


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
    worlds = [
        world
        for world in group_worlds(processes)
        if world.events("update")[0] or world.events("pass")[0]
    ]
    failures = [
        f"{e['observer']}: {e['error']}"
        for events in processes
        for e in events
        if e["kind"] == "failure"
    ]
    return Analysis([_analysis(world, worlds) for world in worlds], list(dict.fromkeys(failures)))


def _analysis(world: World, worlds: list[World]) -> WorldAnalysis:
    steps = max(
        (event.get("step", 0) + (event["kind"] == "update") for event in world.ranks[0]), default=0
    )
    others = [other for other in worlds if other is not world]
    findings = (
        *step_findings(world),
        *file_findings(world),
        *data_findings(world),
        *checkpoint_findings(world, others),
    )
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:  # later epochs repeat a finding
        first.setdefault((finding.name, finding.line), finding)
    return WorldAnalysis(world.program, world.size, steps, list(first.values()))


def file_findings(world: World) -> Iterator[Finding]:
    """Yield the findings of a world about files that several ranks open for writing."""
    writers: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, events in world.events("file").items():
        for event in events:
            writers[event["path"]].setdefault(rank, event["line"])
    shared = {path: lines for path, lines in writers.items() if len(lines) > 1}
    for line in dict.fromkeys(next(iter(lines.values())) for lines in shared.values()):
        paths = [path for path, lines in shared.items() if next(iter(lines.values())) == line]
        ranks = sorted({rank for path in paths for rank in shared[path]})
        names = ", ".join(paths[:_PATHS]) + (
            f" and {len(paths) - _PATHS} more" if len(paths) > _PATHS else ""
        )
        text = f"ranks {', '.join(map(str, ranks))} open {names} for writing"
        yield Finding("files-written-by-several-ranks", text, line)


def checkpoint_findings(world: World, others: Iterable[World]) -> Iterator[Finding]:
    """Yield the finding of a run that resumes within an epoch, and begins an epoch with its first batch."""
    keys, line = _restored(world)
    trained = [one for one in passes(world.ranks[0]) if one.trains]
    if not line or not trained:
        return
    first = trained[0]
    for other in others:
        for name, done, before in _saved_within_epoch(other, keys):
            is_same_epoch = all(
                before.info[key] == first.info[key] for key in ("dataset", "samples", "length")
            )
            # Steps follow the first batches: a loop can skip them.
            if (
                is_same_epoch
                and len(first.batches) > done
                and first.batches[done]["step"] > first.info["step"]
            ):
                text = (
                    f"{name} is saved after {done} of {before.info['length']} batches of an epoch"
                )
                yield Finding(
                    "lost-position",
                    f"{text}; the run that loads it begins with the first batch",
                    line,
                )
                return


def _restored(world: World) -> tuple[list[list[int]], str]:
    """Return the files that rank 0 loads before its first step, and the line where an optimizer loads its state."""
    keys = []
    line = ""
    for event in world.ranks[0]:
        if event["kind"] == "update":
            break
        if event["kind"] == "loaded":
            keys.append(event["key"])
        elif event["kind"] == "optimizer_loaded":
            line = line or event["line"]
    return keys, line


def _saved_within_epoch(world: World, keys: list[list[int]]) -> Iterator[tuple[str, int, Pass]]:
    for events in world.ranks.values():
        numbered = {one.info["number"]: one for one in passes(events) if one.trains}
        for event in events:
            if event["kind"] == "saved" and event["key"] in keys:
                for number, done in event["positions"]:
                    if number in numbered:
                        yield event["name"], done, numbered[number]


def print_report(analysis: Analysis) -> None:
    """Print the findings of each world, and the observed facts."""
    console = Console(markup=False, highlight=False, soft_wrap=False)
    for world in analysis.worlds:
        for finding in world.findings:
            console.print(f"{finding.name}  {finding.line or world.program}", soft_wrap=True)
            console.print(Padding(finding.evidence, (0, 0, 0, 4)))
        count = plural(len(world.findings), "finding")
        print(
            f"{world.program}: {count}; {plural(world.ranks, 'rank')}, {plural(world.steps, 'optimizer step')}"
        )
    for failure in analysis.failures:
        print(f"not observed: {failure}")
