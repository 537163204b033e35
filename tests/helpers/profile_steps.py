"""Synthetic steps and measurements for tests of `samestep profile`."""

from dataclasses import replace

from samestep.tools.profile.measurements import (
    Collective,
    Conditions,
    Costs,
    Measurements,
    Phase,
    ProfilerSummary,
    Segment,
    Step,
)

CONDITIONS = Conditions(
    workers=0,
    cores=8,
    checkpoint_every=None,
    save_seconds=None,
    microbatches=4,
    batch_size=32,
    strategy="ddp",
    device="cpu",
    bucket_mb=None,
    hook="none",
    threads=1,
    is_compiled=False,
    has_graphs=False,
    is_apart=True,
    joins_norms=False,
    engine_waits=1,
    is_known_inside=True,
)
# Large operators use all of the processor time of a step of 100 ms.
BUSY = ProfilerSummary(
    operators=[],
    count=20,
    small=10,
    working_seconds=1.0,
    communication_seconds=0.0,
    synchronisations=0,
    synchronising_seconds=0.0,
    busy_seconds=None,
    step_seconds=0.1,
)


def make_step(
    *phases: tuple[Phase, float], begin: float = 0.0, collectives: tuple[Collective, ...] = (), microbatches: int = 2
) -> Step:
    """Return a step of consecutive phases with durations in seconds, which use the processor all the time."""
    segments = []
    for phase, seconds in phases:
        segments.append(Segment(phase, begin, begin + seconds, seconds))
        begin += seconds
    return Step(1, tuple(segments), collectives, microbatches)


def all_reduce(begin: float, end: float) -> Collective:
    """Return an all-reduce of the engine in the background."""
    return Collective("a tree all-reduce", None, True, begin, end)


def measured(*ranks: list[Step], batch: float = 0.001, **changed: object) -> Measurements:
    """Return measurements of some ranks.

    Args:
        *ranks: steps of each rank.
        batch: seconds to load a batch.
        changed: changed conditions.
    """
    costs = Costs(batch=batch, gradients=0.001, messages=1, gradient_bytes=2**20)
    return Measurements(ranks, {0: BUSY}, costs, replace(CONDITIONS, **changed))
