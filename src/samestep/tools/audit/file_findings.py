"""Findings about files that several ranks write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from samestep.tools.audit.findings import Finding
from samestep.tools.audit.worlds import World

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
