"""What `samestep top` shows, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# `starting`: nothing is heard of it yet. `dead`: nobody holds it, and it has told no end.
State = Literal["starting", "running", "stopped", "ended", "dead"]
Sign = Literal["heard", "silent", "gone", "not heard"]


@dataclass(frozen=True)
class RankRow:
    """One rank.

    Attributes:
        sign: `heard` within the last seconds, `silent` for longer, `gone` where its process is on this machine and has
            ended, `not heard` of at all.
        age_seconds: since it wrote last; None where it has not.
        line: what it wrote last, as `docs/runs.md` has it.
    """

    rank: int
    sign: Sign
    age_seconds: float | None
    line: Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A run at one moment.

    Attributes:
        epoch: the one that the last step belongs to, from 1; 0 before the first step.
        step: optimizer steps done.
        progress: share of all steps.
        seconds_left: at the speed of the last minutes; None where that is not known, or nothing is left.
        loss: of the last step; the name of a value that is no number, such as `nan`.
        evaluation: `epoch`, `loss`, `samples` and metrics of the last one.
        ranks: in order.
        unreadable_lines: in what ranks and events have written.
    """

    run: str
    state: State
    epoch: int
    epochs: int
    step: int
    steps: int | None
    progress: float
    seconds_left: float | None
    loss: float | str | None
    evaluation: Mapping[str, Any]
    ranks: Sequence[RankRow]
    unreadable_lines: int = 0
