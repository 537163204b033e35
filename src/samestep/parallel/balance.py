"""Parts of like size of things in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_parts(sizes: Sequence[int], parts: int) -> list[int]:
    """For each thing the number of its part, so that the largest part is as small as can be.

    Each part has a thing of some size; things of no size go with the one before them. At least `parts` things have a
    size.
    """
    filled = [place for place, size in enumerate(sizes) if size > 0]
    begins = _begins([sizes[place] for place in filled], parts)
    firsts = [filled[begin] for begin in begins[1:]]
    return [sum(place >= first for first in firsts) for place in range(len(sizes))]


def _begins(sizes: Sequence[int], parts: int) -> list[int]:
    """Where each part begins; dynamic programming over how many things the first so many parts have."""
    before = [0, *accumulate(sizes)]
    count = len(sizes)
    # By number of things: the largest part, and where the last one begins.
    best = [(before[end], 0) for end in range(count + 1)]
    history = [best]
    for made in range(2, parts + 1):
        unmade = (before[count] + 1, 0)
        best = [
            min(
                ((max(best[cut][0], before[end] - before[cut]), cut) for cut in range(made - 1, end)),
                default=unmade,
            )
            for end in range(count + 1)
        ]
        history.append(best)
    begins: list[int] = []
    end = count
    for row in reversed(history):
        end = row[end][1]
        begins.append(end)
    return begins[::-1]
