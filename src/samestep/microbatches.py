"""Division of a global batch into microbatches, and their ownership by ranks, in integers."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from samestep.errors import CheckpointError, InputError
from samestep.units import plural


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


def require_integer(
    name: str,
    value: Any,
    *,
    at_least: int,
    at_most: int | None = None,
    example: int,
) -> int:
    """Return an argument as an `int`, from any integer type, such as those of NumPy.

    The error names a valid value, `example`.

    Raises:
        InputError: the value is no integer, or outside of the range.
    """
    number: int | None = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        limits = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InputError(
            f"{name} is {value!r}",
            f"an integer {limits}",
            f"{name}={example}",
            code="E_VALUE",
        )
    return number


@dataclass(frozen=True)
class Cursor:
    """The only position of a run, independent of ranks."""

    epoch: Annotated[int, Ge(0), Le(2**62)] = 0  # number of complete passes over the data
    samples: Annotated[int, Ge(0), Le(2**62)] = 0  # of the current pass, consumed by all ranks


def require_position(cursor: Cursor, samples: int, batch_size: int) -> None:
    """Require that an epoch of `samples` samples has a global batch at the cursor of a checkpoint.

    Raises:
        CheckpointError: the position does not exist.
    """
    if cursor.samples >= samples or cursor.samples % batch_size:
        raise CheckpointError(
            f"the checkpoint is at sample {cursor.samples} of an epoch",
            expected=f"the start of a global batch of {batch_size}, in an epoch of {samples} "
            "samples",
            fix="use the data and the batch size with which the run began",
            code="E_RESUME_CHANGED",
        )
