"""Steps that were never run, to be read."""

from samestep.tools.profile.measured import Circumstances, Costs, Measured, Traced
from samestep.tools.profile.steps import Meeting, Phase, Segment, Step

AROUND = Circumstances(
    workers=0,
    cores=8,
    checkpoint_every=None,
    save_seconds=None,
    shards=4,
    batch_size=32,
    strategy="ddp",
    device="cpu",
    bucket_mb=None,
    hook="none",
    threads=1,
    is_compiled=False,
    is_apart=True,
    joins_norms=False,
    is_known_inside=True,
)
# All of a step's 100 ms of a core is in operators that compute.
BUSY = Traced(
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


def step(*phases: tuple[Phase, float], begin: float = 0.0, meetings: tuple[Meeting, ...] = (), shards: int = 2) -> Step:
    """A step of phases with their seconds, one after another, each of them on a core all the time."""
    segments = []
    for phase, seconds in phases:
        segments.append(Segment(phase, begin, begin + seconds, seconds))
        begin += seconds
    return Step(1, tuple(segments), meetings, shards)


def summed(begin: float, end: float, *, beside: bool = True) -> Meeting:
    """The engine's part in a sum."""
    return Meeting("the sum in tree order", None, beside, begin, end)


def measured(*ranks: list[Step], batch: float = 0.001, **changed: object) -> Measured:
    """Of these ranks, in circumstances that are `changed`; `batch` is what making one takes."""
    costs = Costs(batch=batch, gradients=0.001, messages=1, gradient_bytes=2**20)
    around = Circumstances(**{**AROUND.__dict__, **changed})
    return Measured(ranks, {0: BUSY}, costs, around)
