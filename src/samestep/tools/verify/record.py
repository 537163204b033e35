"""What the ranks of a trial wrote down, put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.runtime.failure import Failure

Noted = Mapping[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """One step as all ranks saw it.

    Attributes:
        by_rank: what each rank noted; ranks share all but their shards.
        shards: what was noted of each shard, by whichever rank had it.
    """

    number: int
    by_rank: tuple[Noted, ...]

    @cached_property
    def shards(self) -> dict[int, Noted]:
        return {int(shard): noted for rank in self.by_rank for shard, noted in rank["shards"].items()}

    @property
    def main(self) -> Noted:
        """What rank 0 noted."""
        return self.by_rank[0]

    @property
    def threads(self) -> set[int]:
        """Threads that ranks computed with."""
        return {rank["threads"] for rank in self.by_rank}

    @property
    def collectives(self) -> int:
        """Collectives that the model issued in the forward of a shard, at most."""
        return max((noted["collectives"] for noted in self.shards.values()), default=0)


@dataclass(frozen=True)
class Record:
    """One trial.

    Attributes:
        events: the notes of each rank, in their order.
        failure: how the trial failed, if it did.
        folder: where the notes and the tensors are.
    """

    processes: int
    folder: Path
    events: tuple[tuple[Noted, ...], ...]
    failure: Failure | None = None
    label: str = field(default="")

    @cached_property
    def steps(self) -> dict[int, StepRecord]:
        """The steps that every rank finished."""
        by_number = [{note["step"]: note for note in notes if note["kind"] == "step"} for notes in self.events]
        shared = set(by_number[0]).intersection(*by_number[1:]) if by_number else set()
        return {number: StepRecord(number, tuple(rank[number] for rank in by_number)) for number in sorted(shared)}

    @property
    def evaluations(self) -> list[Noted]:
        """Evaluations in their order, as rank 0 saw them."""
        return self.noted("evaluation")

    @property
    def engine(self) -> Noted:
        """What rank 0 noted of the engine; empty if none was made."""
        return next(iter(self.noted("engine")), {})

    @property
    def rules(self) -> Noted:
        """The step rules that the engine follows."""
        rules: Noted = self.engine.get("rules", {})
        return rules

    @property
    def is_stuck(self) -> bool:
        """Whether a rank waited in vain for others."""
        return any(note["kind"] == "stuck" for notes in self.events for note in notes)

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset(self.engine.get("parameters", ()))

    def noted(self, kind: str) -> list[Noted]:
        """Rank 0's notes of one kind."""
        return [note for note in self.events[0] if note["kind"] == kind] if self.events else []


def read_record(folder: Path, processes: int, failure: Failure | None = None) -> Record:
    """The record of a trial; a rank that was killed in mid-line loses that line."""
    events = tuple(tuple(_read(folder / f"rank-{rank}.jsonl")) for rank in range(processes))
    return Record(processes, folder, events, failure)


def joined(first: Record, second: Record, label: str) -> Record:
    """A trial that was ended and went on in another one; where a step is in both, the second counts."""
    known = {step for step in second.steps}
    width = max(first.processes, second.processes)
    events = []
    for rank in range(width):
        # A rank that the other part did not have stands for nobody: rank 0 noted the same.
        before = first.events[min(rank, first.processes - 1)]
        after = second.events[min(rank, second.processes - 1)]
        kept = [note for note in before if note["kind"] != "step" or note["step"] not in known]
        events.append((*_without_shards(kept, rank >= first.processes), *_without_shards(after, False)))
    return Record(second.processes, second.folder, tuple(events), second.failure, label)


def _without_shards(notes: Iterable[Noted], is_repeated: bool) -> list[Noted]:
    return [{**note, "shards": {}} if is_repeated and note["kind"] == "step" else note for note in notes]


def _read(file: Path) -> Iterable[Noted]:
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
