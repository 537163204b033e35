"""Findings about files: several ranks write one file, and a checkpoint within an epoch without its position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from samestep.tools.audit.findings import Finding
from samestep.tools.audit.worlds import Pass, World, passes

_PATHS = 3


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
        names = ", ".join(paths[:_PATHS]) + (f" and {len(paths) - _PATHS} more" if len(paths) > _PATHS else "")
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
            if _is_same_epoch(before, first) and len(first.batches) > done and _trains_first_batches(first, done):
                text = f"{name} is saved after {done} of {before.info['length']} batches of an epoch"
                yield Finding("lost-position", f"{text}; the run that loads it begins with the first batch", line)
                return


def _restored(world: World) -> tuple[list[list[int]], str]:
    """Return the files that rank 0 loads before its first step, and the line where an optimizer loads its state."""
    keys, line = [], ""
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


def _is_same_epoch(before: Pass, after: Pass) -> bool:
    return all(before.info[key] == after.info[key] for key in ("dataset", "samples", "length"))


def _trains_first_batches(one: Pass, count: int) -> bool:
    """Whether steps follow the first batches: a loop can skip them."""
    return bool(one.batches[count]["step"] > one.info["step"])
