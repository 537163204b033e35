"""What was measured of a recipe on all of its ranks, before anybody draws conclusions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

from samestep.tools.profile.arrivals import Waiting, waiting
from samestep.tools.profile.intervals import length
from samestep.tools.profile.phases import hidden_seconds, means, phase_seconds, waits
from samestep.tools.profile.steps import Phase, Step


@dataclass(frozen=True)
class Traced:
    """What torch's profiler saw of one rank, a step.

    Attributes:
        operators: those that take most time: name, calls, and seconds of its own.
        count: operators, those that call others among them.
        small: how many of them take less than 20 µs of their own.
        working_seconds: in the others, each as in the step in which it took least: nobody was in its way then.
        communication_seconds: in which something communicated; torch's own too, of which nothing else is known.
        synchronisations: how often the host waited for its device, in calls that do so.
        synchronising_seconds: how long.
        busy_seconds: in which the device computed; None where that is the host.
        step_seconds: of a step under the profiler, which is slower than one without.
    """

    operators: list[tuple[str, float, float]]
    count: float
    small: float
    working_seconds: float
    communication_seconds: float
    synchronisations: float
    synchronising_seconds: float
    busy_seconds: float | None
    step_seconds: float


@dataclass(frozen=True)
class Costs:
    """What parts of a step cost by themselves on these ranks, tried after the steps.

    Attributes:
        batch: seconds in which a rank makes its part of a batch, without loader processes.
        gradients: seconds in which all gradients are summed over ranks, in torch's own buckets; 0 for one rank.
        messages: how many these are.
        gradient_bytes: all of them together.
    """

    batch: float
    gradients: float
    messages: int
    gradient_bytes: int


@dataclass(frozen=True)
class Circumstances:
    """What of recipe and machine advice depends on.

    Attributes:
        workers: loader processes a rank.
        cores: of the machine.
        checkpoint_every: steps, or None for no checkpoints.
        save_seconds: from the state that a checkpoint holds to when it is on the disk; None where there was none.
        shards: of a batch.
        batch_size: samples of a batch.
        strategy: how the model lives on the ranks.
        device: `cpu` or `cuda`.
        bucket_mb: as the recipe says.
        is_compiled: the recipe asks for it.
        is_apart: shards are computed one after another by the thread that trains.
        joins_norms: batch norm meets all ranks.
        is_known_inside: nothing communicates within forward and backward unheard.
    """

    workers: int
    cores: int
    checkpoint_every: int | None
    save_seconds: float | None
    shards: int
    batch_size: int
    strategy: str
    device: str
    bucket_mb: float | None
    hook: str
    threads: int
    is_compiled: bool
    is_apart: bool
    joins_norms: bool
    is_known_inside: bool


@dataclass(frozen=True)
class Measured:
    """All of it.

    Attributes:
        ranks: the same steps of each rank.
        traced: of the ranks that torch's profiler looked at.
    """

    ranks: Sequence[Sequence[Step]]
    traced: dict[int, Traced]
    costs: Costs
    around: Circumstances
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def step_seconds(self) -> float:
        """A step, of the mean rank."""
        return mean(step.seconds for steps in self.ranks for step in steps)

    @cached_property
    def phases(self) -> list[dict[Phase, float]]:
        """What each rank spends on each phase, a step."""
        return [means(steps) for steps in self.ranks]

    @cached_property
    def by_step(self) -> list[list[dict[Phase, float]]]:
        """The same of each rank and step."""
        return [[phase_seconds(step) for step in steps] for steps in self.ranks]

    @cached_property
    def hidden(self) -> list[float]:
        """How long each rank communicates beside its own work, a step."""
        return [mean(hidden_seconds(step) for step in steps) for steps in self.ranks]

    @cached_property
    def waiting(self) -> Waiting:
        """What ranks wait for each other."""
        return waiting(self.ranks)

    @cached_property
    def exposed(self) -> float:
        """How long a rank cannot go on for communication of the engine's, a step; the mean rank."""
        return mean(length(waits(step)) for steps in self.ranks for step in steps) - self.in_users_collectives

    @cached_property
    def cpu_seconds(self) -> float:
        """What forward, backward and optimizer took of a core, a step; of the rank and step with least."""
        return min(
            sum(each.cpu for each in step.segments if each.phase in ("forward", "backward", "optimizer"))
            for steps in self.ranks
            for step in steps
        )

    @cached_property
    def in_users_collectives(self) -> float:
        """How long a rank is in collectives of the user's own, a step; the mean rank."""
        return mean(
            length((each.begin, each.end) for each in step.meetings if each.site is not None and not each.is_beside)
            for steps in self.ranks
            for step in steps
        )


@dataclass(frozen=True)
class Ran:
    """What comes of a trial.

    Attributes:
        traced_steps: of each rank, those under torch's profiler; slower than the others.
        marks: by rank, the times at which marks are in its trace.
    """

    measured: Measured
    traced_steps: list[list[Step]]
    marks: dict[int, float]
