"""How shards are made beside the steps: what can be chosen without changing a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.config import DEFAULT_PREFETCH

WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
PREFETCH = (2, 4, 8)


@dataclass(frozen=True, order=True)
class Setting:
    """One choice; no result depends on it.

    Attributes:
        workers: loader processes a rank.
        prefetch: shards that each of them makes ahead; of no meaning where there are none.
    """

    workers: int
    prefetch: int = DEFAULT_PREFETCH

    def __str__(self) -> str:
        if not self.workers:
            return "no workers"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}, prefetch {self.prefetch}"


@dataclass(frozen=True)
class Choice:
    """A setting that was found.

    Attributes:
        path: the file that says so.
    """

    workers: int
    prefetch: int
    path: str


def grid(workers: Sequence[int], prefetch: Sequence[int]) -> list[Setting]:
    """Every setting of so many workers that make so many shards ahead."""
    several = [Setting(many, ahead) for many in sorted({*workers}) if many for ahead in sorted({*prefetch})]
    return [Setting(0), *several] if 0 in workers else several
