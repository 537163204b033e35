"""What a profile looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samestep.config import RunOptions
from samestep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which steps and ranks are looked at, and how.

    Attributes:
        wait: steps that nobody looks at.
        warmup: steps after those, and once more under torch's profiler, that are not counted.
        active: steps of which phases are noted, without torch's profiler.
        traced: steps after them under torch's profiler; 0 for none.
        ranks: those that torch's profiler looks at, in order; None for all.
        folder: where traces and checkpoints go.
    """

    wait: int
    warmup: int
    active: int
    traced: int
    ranks: tuple[int, ...] | None
    folder: Path
    options: RunOptions

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("traced", 0)):
            value = getattr(self, name)
            if value < least:
                raise InputError(f"--{name} {value}", rule=f"at least {least}", do=f"leave --{name} out")

    @property
    def steps(self) -> int:
        """All that are trained."""
        return self.wait + self.warmup + self.active + (self.warmup + self.traced if self.traced else 0)

    def looks_at(self, rank: int) -> bool:
        """Whether torch's profiler looks at this rank."""
        return bool(self.traced) and (self.ranks is None or rank in self.ranks)


def ranks_of(text: str, size: int) -> tuple[int, ...] | None:
    """What `--ranks` says: `all`, or numbers with commas between.

    Raises:
        InputError: it says something else, or names ranks that are not there.
    """
    if text == "all":
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"--ranks {text}", rule="all, or numbers with commas between", do="--ranks 0,2")
    found = tuple(sorted(set(map(int, parts))))
    missing = [rank for rank in found if rank >= size]
    if missing:
        raise InputError(
            f"--ranks {text} with {size} process{'es' if size > 1 else ''}",
            rule=f"ranks are numbered from 0 to {size - 1}",
            do="--ranks all, or more --processes",
        )
    return found
