"""Division of batches into microbatches, their owners, and the refusal of too many ranks."""

from __future__ import annotations

from samestep.errors import InputError
from samestep.units import plural

MOST_MICROBATCHES = 8  # of a call, where the script gives no number


def microbatch_bounds(size: int, microbatches: int) -> list[tuple[int, int]]:
    """Return one slice `[start, stop)` of a global batch of `size` samples per microbatch.

    Sizes differ by at most one. A batch smaller than `microbatches` has empty microbatches, which
    do not take part in the step.
    """
    return [(size * v // microbatches, size * (v + 1) // microbatches) for v in range(microbatches)]


def owned_microbatches(microbatches: int, ranks: int, rank: int) -> range:
    """Return the microbatches of one of some ranks: `[V*r//R, V*(r+1)//R)`."""
    return range(microbatches * rank // ranks, microbatches * (rank + 1) // ranks)


def require_enough_microbatches(
    microbatches: int, data_ranks: int, *, ranks_per_model: int = 1
) -> None:
    """Require a microbatch for each of `data_ranks` ranks, or groups of ranks with one model.

    Raises:
        InputError: a rank would have no microbatch.
    """
    if data_ranks > microbatches:
        processes = microbatches * ranks_per_model
        raise InputError(
            f"{data_ranks} ranks share the data but there are {plural(microbatches, 'microbatch')}",
            expected="ranks that share the data <= microbatches: each computes at least one",
            fix=f"--processes {processes}; or microbatches={data_ranks} or more",
            code="E_TOO_MANY_RANKS",
        )


def require_microbatches(microbatches: int | None, size: int) -> None:
    """Require a microbatch of each call for each rank; None: the script gives no number.

    Raises:
        InputError: there are more ranks.
    """
    number = microbatches
    if number is None:
        number = MOST_MICROBATCHES
    if number < size:
        raise InputError(
            f"{size} ranks divide the calls of a module into {number} microbatches",
            expected="at least one microbatch for each rank",
            fix=f"{number} processes; or samestep.parallel(model, microbatches={size}) "
            "on every number of processes",
            code="E_TOO_MANY_RANKS",
        )
