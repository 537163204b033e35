"""How the calls of a kind are divided, and whether a division is worth its messages.

The size of a call is decided by arithmetic, not by measured time: times differ between ranks and
runs, and a whole call has other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


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
        form: `flat` or `inner` graph (`view/divided.py`).
        sums: number of operations of the forward that need a sum over the slices, as of batch norm.
        operations_per_row: floating-point operations of the forward, per row.
        operations: functions that were tried, in order, after their switches.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[Output, ...]
    draw_factors: tuple[int | None, ...] = ()
    minimum_rows: int = 1
    form: Literal["flat", "inner"] = "flat"
    sums: int = 0
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


_OPERATIONS_PER_ELEMENT = 4.0  # of functions that are no products, which wait for memory


@dataclass(frozen=True)
class _Speeds:
    """Magnitudes of a device: operations and bytes per second, seconds per call and per sum."""

    operations: float
    bytes: float
    call: float
    sum: float


_CPU = _Speeds(5e10, 1e9, 5e-4, 7e-4)
_GPU = _Speeds(2e13, 2e10, 3e-4, 1e-4)


class WorkCounter(TorchDispatchMode):
    """Counts the floating-point operations of its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        count: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.operations += count(*arguments, **options, out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.operations += _OPERATIONS_PER_ELEMENT * leaf.numel()
        return result


def is_worth_dividing(
    *,
    operations: float,
    gradient_bytes: int,
    output_bytes: int,
    sums: int,
    parts: int,
    has_gradients: bool,
    is_cpu: bool,
) -> bool:
    """Whether dividing a call saves more than it costs.

    Args:
        operations: floating-point operations of the forward of the whole batch.
        gradient_bytes: size of the gradients that are summed.
        output_bytes: size of the outputs that are gathered.
        sums: number of sums over ranks inside of the forward, as of batch norm; the backward has as
            many.
        parts: largest number of ranks.
        has_gradients: whether a backward follows, which has twice the operations of the forward.
        is_cpu: whether the call is computed on CPUs.
    """
    speeds = _CPU if is_cpu else _GPU
    moved = output_bytes
    if has_gradients:
        operations *= 3
        sums *= 2
        moved = 2 * output_bytes + gradient_bytes
    saved = operations * (1 - 1 / parts) / speeds.operations
    return saved > speeds.call + sums * speeds.sum + moved / speeds.bytes
