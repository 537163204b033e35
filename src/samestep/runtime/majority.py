"""Who of several ranks is the odd one out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


def odd_ranks(found: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose value is not that of more than half of all; none where no value has so many.

    With two ranks that differ, or a tie, nobody can tell who is right.
    """
    values = list(found.values())
    for value in set(values):
        if 2 * values.count(value) > len(values):
            return [rank for rank, own in found.items() if own != value]
    return []


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
