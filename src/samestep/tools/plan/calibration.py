"""Results of a calibration: times, sizes and memory that the model of `samestep plan` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from samestep.tools.plan.collectives import Link


@dataclass(frozen=True)
class Stage:
    """Stage of a pipeline.

    Attributes:
        parameter_bytes: bytes of its parameters.
        share: part of the time of a forward.
        sent_bytes: bytes of activations of a microbatch that the next stage receives.
    """

    parameter_bytes: int
    share: float
    sent_bytes: int


@dataclass(frozen=True)
class TensorPlan:
    """Divided products of a model, for one microbatch.

    Attributes:
        parameter_bytes: bytes of the divided parameters.
        share: part of the time of a forward.
        reduced_bytes: bytes of each sum over ranks, in forward and backward.
        gathered_bytes: bytes of each gathered result.
    """

    parameter_bytes: int
    share: float
    reduced_bytes: tuple[int, ...]
    gathered_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model and its optimizer in bytes, and its divisions.

    Attributes:
        parameters: all parameters.
        gradients: each trained parameter, in the order of the model.
        buffers: all buffers.
        optimizer: state of the optimizer.
        activations: tensors that backward of one microbatch needs, without parameters.
        units: parameters that FSDP gathers together.
        stages: stages by number of pipeline ranks.
        tensor: divided products; None without a plan.
        reasons: reason for which the model excludes a layout, by the number of the layout.
    """

    parameters: int
    gradients: tuple[int, ...]
    buffers: int
    optimizer: int
    activations: int
    units: tuple[int, ...]
    stages: Mapping[int, tuple[Stage, ...]] = field(default_factory=dict)
    tensor: TensorPlan | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalStep:
    """Step of one rank without communication.

    Attributes:
        seconds: time of a step, including the wait for data.
        update: part of it after the gradients: clipping, optimizer, statistics.
        peak: memory in bytes: of the process on a CPU, of tensors on a GPU.
    """

    seconds: float
    update: float
    peak: int


@dataclass(frozen=True)
class Calibration:
    """Measurements of one recipe on this machine.

    Attributes:
        device: `cpu` or the type of the accelerator.
        cores: usable processors; None if each rank has a device.
        base: memory of a rank before the model is built, in bytes.
        steps: by number of microbatches of a rank.
        slowdown: time of a step relative to one active rank, by number of active ranks on the machine.
        pairs: exchange of two vectors and their addition, by number of active ranks.
        gathers: all-gather, seconds of a byte received, by number of active ranks.
        messages: message of a pipeline from one rank to another, by number of active ranks.
        copy_seconds: seconds to copy a byte in memory, for a checkpoint.
        deviation: relative standard deviation of the time of a step.
        facts: sizes of the model.
        overheads: seconds of a trial beyond the model: `ddp` per step, `fsdp` per unit and microbatch, `tp` and `pp`
            per message.
        measured: seconds of a step of the layouts that were run as planned, by name.
        rank_bytes: memory of one of several ranks beyond that of a rank alone; stages of a pipeline have none.
    """

    device: str
    cores: int | None
    base: int
    steps: Mapping[int, LocalStep]
    slowdown: Mapping[int, float]
    pairs: Mapping[int, Link]
    gathers: Mapping[int, Link]
    messages: Mapping[int, Link]
    copy_seconds: float
    deviation: float
    facts: ModelFacts
    overheads: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    rank_bytes: int = 0

    def slowdown_of(self, ranks: int) -> float:
        """Return the slowdown with `ranks` active ranks on a machine, which share its cores on a CPU."""
        if self.cores is None:
            return 1.0
        return (
            interpolate(self.slowdown, ranks)
            if ranks <= max(self.slowdown)
            else (self.slowdown[max(self.slowdown)] * max(1.0, ranks / max(self.cores, *self.slowdown)))
        )

    def step_seconds(self, microbatches: int) -> float:
        """Return the time of a step of one rank with a number of microbatches."""
        return interpolate({count: step.seconds for count, step in self.steps.items()}, microbatches)

    def peak(self, microbatches: int) -> float:
        """Return the memory of one rank with a number of microbatches."""
        return interpolate({count: float(step.peak) for count, step in self.steps.items()}, microbatches)

    @property
    def update(self) -> float:
        """Seconds of a step after the gradients."""
        return min(step.update for step in self.steps.values())


def interpolate(values: Mapping[int, float], position: int) -> float:
    """Return the value at a position on the line through the nearest two measured positions; the nearest for one."""
    known: Sequence[int] = sorted(values)
    if position in values or len(known) == 1:
        return values[position if position in values else known[0]]
    above = next((number for number in known if number > position), known[-1])
    index = max(1, known.index(above))
    low, high = known[index - 1], known[index]
    return values[low] + (values[high] - values[low]) * (position - low) / (high - low)
