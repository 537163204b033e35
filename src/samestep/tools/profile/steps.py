"""One step of one rank, as it was noted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# What the thread that trains is at; `computing` is forward and backward where these cannot be told apart.
Phase = Literal["data", "forward", "backward", "computing", "communication", "optimizer", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = (
    "data",
    "forward",
    "backward",
    "computing",
    "communication",
    "optimizer",
    "checkpoint",
    "other",
)


@dataclass(frozen=True)
class Segment:
    """The thread that trains was at one thing.

    Attributes:
        begin: seconds by the machine's monotonic clock; so are all moments.
        cpu: seconds for which that thread had a core.
    """

    phase: Phase
    begin: float
    end: float
    cpu: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """This rank's part in one communication.

    Attributes:
        what: such as `an all-reduce`.
        site: the line of a user's code that asked for it; None for what the engine does.
        is_beside: it was in another thread than the one that trains.
        begin: when this rank came to it.
    """

    what: str
    site: str | None
    is_beside: bool
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        segments: without gaps, in order.
        meetings: in the order in which they ended.
        shards: how many this rank computed.
    """

    number: int
    segments: tuple[Segment, ...]
    meetings: tuple[Meeting, ...]
    shards: int

    @property
    def begin(self) -> float:
        """When it began, with the wait for its data."""
        return self.segments[0].begin

    @property
    def end(self) -> float:
        """When all was done, with a checkpoint where there was one."""
        return self.segments[-1].end

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.end - self.begin

    def as_data(self) -> list[Any]:
        """What `from_data` reads, short enough to be sent."""
        segments = [
            [each.phase, round(each.begin, 7), round(each.end, 7), round(each.cpu, 7)] for each in self.segments
        ]
        meetings = [
            [each.what, each.site, each.is_beside, round(each.begin, 7), round(each.end, 7)] for each in self.meetings
        ]
        return [self.number, segments, meetings, self.shards]

    @classmethod
    def from_data(cls, data: list[Any]) -> Step:
        """A step that another rank noted."""
        number, segments, meetings, shards = data
        return cls(
            number,
            tuple(Segment(*each) for each in segments),
            tuple(Meeting(*each) for each in meetings),
            shards,
        )
