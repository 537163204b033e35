"""Events of an audit, grouped by world and rank: one command can hold several worlds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_events(folder: Path) -> Iterator[list[Event]]:
    """Yield the events of each process; the last line of a killed process can be incomplete."""
    # In the order of the starts: names begin with the time.
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")
        yield [json.loads(line) for line in lines[:-1]]


def _lists() -> defaultdict[int, list[Event]]:
    return defaultdict(list)


@dataclass
class World:
    """The ranks of one process group, or one process without a group."""

    size: int
    program: str  # script of the first process
    has_group: bool = True
    ranks: dict[int, list[Event]] = field(default_factory=_lists)  # events of each rank
    children: dict[int, list[Event]] = field(default_factory=_lists)  # of their loader workers

    def events(self, kind: str) -> dict[int, list[Event]]:
        """Return the events of one kind, for each rank in order."""
        ranks = sorted(self.ranks)
        return {rank: [e for e in self.ranks[rank] if e["kind"] == kind] for rank in ranks}


def group_worlds(processes: Iterable[list[Event]]) -> list[World]:
    """Return the worlds of which all ranks were observed.

    A process without a group is a world of one rank, or a rank of the world of its launcher.
    """
    worlds: dict[str, World] = {}
    launched: list[list[Any]] = []  # identities of ranks without a group

    def ranks_of(identity: list[Any], *, is_child: bool = False) -> list[Event]:
        """Return the list of the events of a rank, or of its children."""
        identifier, rank, size = identity
        has_group = size == 1 or identity not in launched
        world = worlds.setdefault(identifier, World(size, header["program"], has_group))
        return (world.children if is_child else world.ranks)[rank]

    for header, *others in filter(None, processes):  # a killed process can have no complete event
        identity = header["world"]
        is_child = identity is not None  # the parent had joined a world before the fork
        before: list[Event] = []  # events before the first world
        alone = [f"process {header['pid']}", 0, 1]
        for event in others:
            if event["kind"] == "world":
                identity = event["world"]
                is_child = False
                ranks_of(identity).extend(before)
                before = []
            elif identity is None:
                if event["kind"] == "launched":
                    alone = [f"{header['program']} {event['job']}", event["rank"], event["size"]]
                    launched.append(alone)
                before.append(event)
            else:
                ranks_of(identity, is_child=is_child).append(event)
        if before:
            ranks_of(alone).extend(before)
    return [world for world in worlds.values() if len(world.ranks) == world.size]


@dataclass
class Pass:
    """One pass of one rank over a dataset."""

    info: Event
    batches: list[Event] = field(default_factory=list)
    last_step: int = 0
    has_ended: bool = False
    optimizer: int | None = None  # of the last step before the end

    @property
    def samples(self) -> list[int]:
        """All samples in order."""
        return [sample for batch in self.batches for sample in batch["samples"]]

    @property
    def trains(self) -> bool:
        """Whether optimizer steps happened during the pass."""
        return bool(self.last_step > self.info["step"])


def passes(events: list[Event]) -> list[Pass]:
    """Return the passes among the events of a rank."""
    result: dict[int, Pass] = {}
    for event in events:
        if event["kind"] == "pass":
            result[event["number"]] = Pass(event)
        elif event["kind"] in ("batch", "pass_end"):
            current = result[event["number"]]
            current.last_step = event["step"]
            current.has_ended = event["kind"] == "pass_end"
            current.optimizer = event.get("optimizer")
            if not current.has_ended:
                current.batches.append(event)
    return list(result.values())


def matching_passes(world: World) -> Iterator[dict[int, Pass]]:
    """Yield the passes that all ranks make over the same dataset, at the same line and step."""
    groups: dict[Any, dict[int, Pass]] = defaultdict(dict)
    for rank in range(world.size):
        loaders: dict[Any, list[int]] = defaultdict(list)
        counts: dict[Any, int] = defaultdict(int)
        for one in passes(world.ranks[rank]):
            place = (one.info["line"], one.info["dataset"])
            # Numbered by line: rank 0 can have more loaders, such as one of an evaluation.
            if one.info["loader"] not in loaders[place]:
                loaders[place].append(one.info["loader"])
            loader = (*place, loaders[place].index(one.info["loader"]))
            counts[loader] += 1
            groups[*loader, counts[loader], one.info["step"]][rank] = one
    yield from (group for group in groups.values() if len(group) == world.size)
