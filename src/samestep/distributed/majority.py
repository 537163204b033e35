"""Ranks whose value differs from that of the majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping


def odd_ranks(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks whose value differs from the majority's; empty without a strict majority, as of two ranks."""
    for value, count in Counter(values.values()).most_common(1):
        if 2 * count > len(values):
            return [rank for rank, other in values.items() if other != value]
    return []
