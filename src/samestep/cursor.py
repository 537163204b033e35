"""The position of a run in its data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cursor:
    """The only position that a run has; it knows no rank.

    Attributes:
        epoch: passes over the data that are complete.
        samples: samples of the current pass that all ranks together have used.
    """

    epoch: int = 0
    samples: int = 0
