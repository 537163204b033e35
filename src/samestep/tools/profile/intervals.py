"""Stretches of time: unions, overlaps, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order."""
    found: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The time that is in both, in intervals that do not overlap."""
    left, right = union(some), union(others)
    found: list[Interval] = []
    place = 0
    for begin, end in left:
        while place and right[place - 1][1] > begin:
            place -= 1
        while place < len(right) and right[place][0] < end:
            shared = max(begin, right[place][0]), min(end, right[place][1])
            if shared[1] > shared[0]:
                found.append(shared)
            place += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together, what overlaps counted once."""
    return sum(end - begin for begin, end in union(intervals))
