"""What scripts print: numbers that verify does not see come from are at least put side by side."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.tools.verify.record import Record


def printed_note(reference: Record, others: Sequence[Record]) -> tuple[str, ...]:
    """The first line that rank 0 prints otherwise on another number of processes, if there is one."""
    ours = printed(reference)
    for other in others:
        pairs = zip(ours, printed(other), strict=False)
        first = next(((mine, its) for mine, its in pairs if mine != its), None)
        if first is not None and not other.label and other.failure is None:
            return (
                f"rank 0 prints {first[0]!r} on {reference.processes} and {first[1]!r} on {other.processes} processes; "
                "where a script computes that by itself, nothing here has looked at it",
            )
    return ()


def printed(record: Record) -> list[str]:
    """The lines that rank 0 of a script printed."""
    file = record.folder / "output-0.log"
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
