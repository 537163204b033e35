"""Division of a global batch into microbatches, and their ownership by ranks, in integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.errors import InputError
from samestep.units import plural


def microbatch_bounds(size: int, microbatches: int) -> list[tuple[int, int]]:
    """Return one slice `[start, stop)` of a global batch of `size` samples per microbatch.

    Sizes differ by at most one. A batch smaller than `microbatches` has empty microbatches, which do not take part in
    the step.
    """
    return [(size * v // microbatches, size * (v + 1) // microbatches) for v in range(microbatches)]


def owned_microbatches(microbatches: int, size: int, rank: int) -> range:
    """Return the microbatches of rank `rank` of `size`: `[V*r//R, V*(r+1)//R)`."""
    return range(microbatches * rank // size, microbatches * (rank + 1) // size)


def require_enough_microbatches(microbatches: int, data_ranks: int, ranks_per_model: int = 1) -> None:
    """Require a microbatch for each of `data_ranks` ranks, or groups of `ranks_per_model` ranks, with different data.

    Raises:
        InputError: a rank would have no microbatch.
    """
    if data_ranks > microbatches:
        idle = data_ranks - microbatches
        raise InputError(
            f"{data_ranks} ranks share the data but the recipe has {microbatches} microbatches, "
            f"so {plural(idle, 'rank')} would have nothing to do",
            expected="ranks that share the data <= microbatches",
            fix=f"--processes {microbatches * ranks_per_model}, or set microbatches: {data_ranks} "
            "(this changes batch-norm groups and dropout, so results change)",
            code="E_TOO_MANY_RANKS",
        )


# Position of a run in the training data.


@dataclass(frozen=True)
class Cursor:
    """The only position of a run, independent of ranks."""

    epoch: int = 0  # number of complete passes over the data
    samples: int = 0  # samples of the current pass consumed by all ranks together
