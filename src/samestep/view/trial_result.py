"""How the calls of a kind are divided, or why they are computed whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Output:
    """One leaf of the outputs of a divided call, in the order of `leaves.flatten`.

    Attributes:
        kind: `rows`: the first dimension is `factor` times the number of rows, and outputs of ranks
            are concatenated; `mean`: outputs of ranks are averaged with the numbers of own rows as
            weights; `sum`: they are added; `constant`: a tensor that does not depend on the rows,
            equal on all ranks; `value`: not a tensor, equal on all ranks; `count`: an integer that
            is `factor` times the number of rows, such as a size.
        factor: rows of the output per row of the batch, for `rows` and `count`.
    """

    kind: Literal["rows", "mean", "sum", "constant", "value", "count"]
    factor: int = 1


@dataclass(frozen=True)
class Division:
    """Result of a trial for one list of operations: the call can be divided.

    Attributes:
        inputs: for each leaf of (args, kwargs) in the order of `tree_flatten`: whether it is a
            tensor with a first dimension that is cut into own rows. Each rank receives other leaves
            as they are.
        outputs: leaves of the outputs.
        draw_factors: for each random draw in order: numbers per row in its first dimension; None if
            shared.
        minimum_rows: smallest number of own rows for which whole and divided agree (1 or 2).
        sums: number of operations of the forward that need a sum over the slices, as of batch norm.
        operations_per_row: floating-point operations of the forward, per row.
        operations: functions that were tried, in order, after their switches.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[Output, ...]
    draw_factors: tuple[int | None, ...] = ()
    minimum_rows: int = 1
    sums: int = 0
    # Not compared: several lists of operations can have one division (`Kind.divides`).
    operations_per_row: float = field(default=0.0, compare=False)
    operations: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class ComputedWhole(Exception):
    """The calls of a kind are computed whole, for the reason that is the text of this exception."""


LONGEST_REASON = 120


def shortened(reason: str) -> str:
    """Return the first line of a reason, cut where it is too long for one line of a summary."""
    reason = reason.strip().partition("\n")[0]
    if len(reason) <= LONGEST_REASON:
        return reason
    return f"{reason[: LONGEST_REASON - 3].rstrip()}..."


def failure(phrase: str, error: Exception) -> str:
    """Return a reason that names an exception.

    Args:
        phrase: plain words, which come first.
        error: the exception.
    """
    return shortened(f"{phrase} ({type(error).__name__}: {error}".partition("\n")[0] + ")")
