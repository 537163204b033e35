"""Division of a global batch into microbatches, and their ownership by ranks, in integers."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from samestep.errors import CheckpointError, InputError
from samestep.units import plural

# Number of ranks with equal shares of the microbatches, or the share of each rank.
Shares = int | tuple[int, ...]


def microbatch_bounds(size: int, microbatches: int) -> list[tuple[int, int]]:
    """Return one slice `[start, stop)` of a global batch of `size` samples per microbatch.

    Sizes differ by at most one. A batch smaller than `microbatches` has empty microbatches, which
    do not take part in the step.
    """
    return [(size * v // microbatches, size * (v + 1) // microbatches) for v in range(microbatches)]


def owned_microbatches(microbatches: int, shares: Shares, rank: int) -> range:
    """Return the microbatches of a rank, in proportion to the shares.

    With R equal shares of V microbatches they are `[V*r//R, V*(r+1)//R)`.
    """
    if isinstance(shares, int):
        return range(microbatches * rank // shares, microbatches * (rank + 1) // shares)
    total = sum(shares)
    before = sum(shares[:rank])
    return range(microbatches * before // total, microbatches * (before + shares[rank]) // total)


def rank_count(shares: Shares) -> int:
    """Return the number of ranks that have the shares."""
    if isinstance(shares, int):
        return shares
    return len(shares)


def require_shares(
    shares: tuple[int, ...], data_ranks: int, microbatches: int | None = None
) -> None:
    """Require a share for each of `data_ranks` ranks that is at least one microbatch.

    Raises:
        InputError: there are other numbers of shares than ranks, or a rank would have no
            microbatch.
    """
    is_valid = len(shares) == data_ranks and min(shares) >= 1
    text = ",".join(map(str, shares))
    if microbatches is not None:
        text += f" of {plural(microbatches, 'microbatch')}"
        is_valid = is_valid and all(
            owned_microbatches(microbatches, shares, rank) for rank in range(data_ranks)
        )
    if not is_valid:
        raise InputError(
            f"shares {text} for {plural(data_ranks, 'rank')} that share the data",
            expected="a positive share for each of these ranks, with at least one microbatch",
            fix=f"--shares {','.join(['1'] * data_ranks)} for equal shares; or more microbatches, "
            "with other results",
            code="E_STRATEGY",
        )


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
