"""Recorded steps of all ranks, and their measurements: time per phase, lateness of ranks, the slowest rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any, Literal, NamedTuple, get_args

# `computing`: forward and backward of microbatches that are not computed one after another.
Phase = Literal["data", "forward", "backward", "computing", "communication", "optimizer", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PhaseSeconds = dict[Phase, float]
Interval = tuple[float, float]

# Arrivals at a collective within so many seconds count as simultaneous.
_SIMULTANEOUS = 0.0005

# --- steps of a rank ---


class Segment(NamedTuple):
    """One phase of the training thread."""

    phase: Phase
    begin: float  # seconds of the machine's monotonic clock, as all times here
    end: float
    cpu: float = 0.0  # processor time of the thread, in seconds


class Collective(NamedTuple):
    """One collective operation of a rank."""

    name: str  # for example `a tree all-reduce`
    site: str | None  # line of the user's code that called the operation; None for operations of the engine
    is_background: bool  # the operation ran in another thread than the training thread
    begin: float  # arrival of this rank
    end: float


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    number: int
    segments: tuple[Segment, ...]  # in order and without gaps, from the wait for data to the checkpoint
    collectives: tuple[Collective, ...]  # in the order of their ends
    microbatches: int  # number of microbatches of this rank

    @classmethod
    def of(cls, number: int, segments: list[Any], collectives: list[Any], microbatches: int) -> Step:
        """Return a step from its fields as JSON values."""
        named = tuple(Segment(*values) for values in segments), tuple(Collective(*values) for values in collectives)
        return cls(number, *named, microbatches)

    @property
    def begin(self) -> float:
        return self.segments[0].begin

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.segments[-1].end - self.begin

    @cached_property
    def exposed(self) -> list[Interval]:
        """Intervals in which the training thread waited for communication."""
        waits = [(s.begin, s.end) for s in self.segments if s.phase == "communication"]
        waits += [(c.begin, c.end) for c in self.collectives if not c.is_background]
        # Microbatches that are computed concurrently all wait for one collective.
        computing = [(s.begin, s.end) for s in self.segments if s.phase == "computing"]
        return union(waits + overlap(computing, self._background))

    @cached_property
    def phases(self) -> PhaseSeconds:
        """Seconds of each phase. Exposed communication is subtracted from the phase that contains it."""
        result: PhaseSeconds = dict.fromkeys(PHASES, 0.0)
        for phase, begin, end, _ in self.segments:
            if phase != "communication":
                result[phase] += end - begin - length(overlap([(begin, end)], self.exposed))
        result["communication"] = length(self.exposed)
        return result

    @property
    def hidden_seconds(self) -> float:
        """Seconds of communication in parallel to computation."""
        return length(self._background) - length(overlap(self._background, self.exposed))

    @property
    def _background(self) -> list[Interval]:
        return [(c.begin, c.end) for c in self.collectives if c.is_background]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    result: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def overlap(some: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals as disjoint intervals, in order."""
    return union((max(begin, start), min(end, stop)) for begin, end in some for start, stop in others)


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    return sum(end - begin for begin, end in union(intervals))


def computing_seconds(phases: PhaseSeconds) -> float:
    """Return the time of forward and backward."""
    return phases["forward"] + phases["backward"] + phases["computing"]


# --- measurements of all ranks ---


@dataclass(frozen=True)
class ProfilerSummary:
    """Events of torch's profiler on one rank, per step; steps are slower than without the profiler."""

    operators: list[dict[str, Any]]  # `name`, `calls` and own `seconds` of the operators with the most time
    count: float  # number of operators, including those called by other operators
    small: float  # number of operators with less than 20 µs of their own
    working_seconds: float  # time in the other operators, each in its fastest step, without delays by other programs
    communication_seconds: float
    synchronisations: float  # number of calls in which the host waited for its device
    synchronising_seconds: float
    busy_seconds: float | None  # time with a computing device; None if the host computes
    step_seconds: float


@dataclass(frozen=True)
class Costs:
    """Parts of a step, timed separately on these ranks."""

    batch: float  # seconds to load one rank's part of a batch without loader processes
    gradients: float  # seconds to all-reduce all gradients in buckets of torch's default size; 0 for one rank
    messages: int  # number of these buckets
    gradient_bytes: int  # size of all gradients


@dataclass(frozen=True)
class Conditions:
    """Properties of recipe, model and machine that the advice depends on."""

    workers: int  # loader processes of a rank
    cores: int
    checkpoint_every: int | None
    save_seconds: float | None  # mean time until a checkpoint was on disk; None without checkpoints
    microbatches: int
    batch_size: int
    strategy: str
    device: str
    bucket_mb: float | None
    hook: str
    threads: int
    is_compiled: bool
    has_graphs: bool  # of CUDA, in usual runs: a profile has none
    is_apart: bool  # the training thread computes microbatches one after another
    joins_norms: bool  # batch norm exchanges statistics between ranks
    engine_waits: int  # number of times per step that the engine waits for its device
    is_known_inside: bool  # all communication within forward and backward is measured


@dataclass(frozen=True)
class Lateness:
    """Waits of ranks for later ranks, by arrival times.

    Durations do not identify a late rank: a collective ends on all ranks at the same time, and is shortest on the rank
    that arrives last.
    """

    steps: int  # number of steps whose collectives could be matched between ranks
    apart: int  # number of collectives with uneven arrivals
    last: list[int]  # number of those at which each rank arrived last
    caused: list[float]  # wait of the other ranks for each rank, in seconds per step; the mean of these other ranks
    caused_in_user_code: list[float]  # part of `caused` in collectives of user code
    waited: list[float]  # wait of each rank for later ranks, in seconds per step

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Step]]) -> Lateness:
        """Return the lateness in steps of all ranks; steps with different collectives on ranks are left out."""
        size = len(ranks)
        known = apart = 0
        last = [0] * size
        caused, in_user_code, waited = [0.0] * size, [0.0] * size, [0.0] * size
        for steps in zip(*ranks, strict=True):
            matched = list(_matched_collectives(steps))
            known += bool(matched)
            waits: dict[tuple[int, int, bool], list[Interval]] = defaultdict(list)
            for collectives in matched:
                begins = [collective.begin for collective in collectives]
                arrival = max(begins)
                latest = begins.index(arrival)
                if arrival - min(begins) > _SIMULTANEOUS:
                    apart += 1
                    last[latest] += 1
                for rank, (_, site, _, begin, end) in enumerate(collectives):
                    if begin < arrival:
                        waits[rank, latest, site is not None].append((begin, min(arrival, end)))
            for (rank, latest, is_user_code), intervals in waits.items():
                seconds = length(overlap(steps[rank].exposed, intervals))
                waited[rank] += seconds
                caused[latest] += seconds / (size - 1)
                in_user_code[latest] += is_user_code * seconds / (size - 1)
        means = ([total / max(1, known) for total in totals] for totals in (caused, in_user_code, waited))
        return cls(known, apart, last, *means)


def _matched_collectives(steps: Sequence[Step]) -> Iterator[tuple[Collective, ...]]:
    """Yield each collective of a step as seen by every rank, unless ranks called different collectives."""
    for is_background in (False, True):
        rows = [[c for c in step.collectives if c.is_background == is_background] for step in steps]
        if len({tuple((c.name, c.site is None) for c in row) for row in rows}) > 1:
            return
        yield from zip(*rows, strict=True)


@dataclass(frozen=True)
class Measurements:
    """Measurements of all ranks; times per step, in seconds."""

    ranks: Sequence[Sequence[Step]]  # the same steps of each rank
    traced: dict[int, ProfilerSummary]  # summaries of torch's profiler, by rank
    costs: Costs
    conditions: Conditions
    traced_steps: Sequence[Sequence[Step]] = ()  # steps of each rank under torch's profiler
    clock_marks: Mapping[int, float] = field(default_factory=dict)  # times of the clock marks in the traces, by rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def steps(self) -> list[Step]:
        """The steps of all ranks."""
        return [step for steps in self.ranks for step in steps]

    @cached_property
    def step_seconds(self) -> float:
        """Mean duration of a step."""
        return mean(step.seconds for step in self.steps)

    @cached_property
    def slowest_seconds(self) -> float:
        """Mean duration of a step on the rank with the longest one; no part of a step and no saving is longer."""
        longest: list[float] = [max(step.seconds for step in steps) for steps in zip(*self.ranks, strict=True)]
        return mean(longest)

    @cached_property
    def phases(self) -> list[PhaseSeconds]:
        """Mean time of each phase, by rank."""
        return [{phase: mean(step.phases[phase] for step in steps) for phase in PHASES} for steps in self.ranks]

    @cached_property
    def hidden(self) -> list[float]:
        """Mean time of communication in parallel to computation, by rank."""
        return [mean(step.hidden_seconds for step in steps) for steps in self.ranks]

    @cached_property
    def lateness(self) -> Lateness:
        """Waits of ranks for later ranks."""
        return Lateness.of(self.ranks)

    @cached_property
    def in_user_collectives(self) -> float:
        """Mean time in collectives of user code."""
        return mean(
            length((c.begin, c.end) for c in step.collectives if c.site is not None and not c.is_background)
            for step in self.steps
        )

    @cached_property
    def exposed(self) -> float:
        """Mean time of exposed communication of the engine."""
        return mean(step.phases["communication"] for step in self.steps) - self.in_user_collectives

    def saving(self, reduction: Callable[[int, PhaseSeconds], float]) -> float:
        """Return by how much steps would be shorter, on average.

        A step takes as long as its busiest rank, which differs from step to step. `reduction` is that of a rank's own
        time in a step, as a function of the rank and its phases.
        """
        savings: list[float] = []
        for steps in zip(*self.ranks, strict=True):
            busy = [sum(step.phases.values()) - step.phases["communication"] for step in steps]
            reduced = [own - reduction(rank, steps[rank].phases) for rank, own in enumerate(busy)]
            savings.append(max(busy) - max(reduced))
        return max(0.0, mean(savings))
