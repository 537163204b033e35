"""Trial of a kind of calls: a few rows, computed whole and in parts, in this process alone, without a trace.

The judge computes in float64, with parameters that are moved a little, so that zeros are not zero,
and with rows in another order. Its tolerance is a constant. Every rank has the same whole batch and
so comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from samestep.distributed.device_reads import device_reads
from samestep.view.division import ComputedWhole, Division, WorkCounter, failure
from samestep.view.lockstep import AllHere, Part, run_in_lockstep
from samestep.view.operations import Operation
from samestep.view.sandbox import sandbox
from samestep.view.trial_run import Change, Run, Setting
from samestep.view.verdict import Verdict, rows_factor

# Rows of the parts; with little memory, or if a single row fails, as in batch norm, other ones.
# Three parts, since a quotient of two parts can be their mean by chance.
_PARTS = (1, 2, 3)
_LARGER_PARTS = (2, 2, 3)
_FEW_PARTS = (1, 1)
_DTYPE_WORDS = ("'Double'", "double", "Double", "dtype", "float64", "data type", "scalar type")


class _DtypeRefused(ComputedWhole):
    """An operation does not compute in this precision."""


class _Failed(ComputedWhole):
    """The whole call fails with the rows of the trial."""


class _OtherKind(ComputedWhole):
    """The whole call has other operations with other rows."""


def try_division(
    module: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    *,
    forward: Callable[..., Any],
    divided: Callable[..., Any],
    rows: int,
    has_rows: tuple[bool, ...],
) -> Division:
    """Compare a whole with a divided call and return how calls of this kind are divided.

    Args:
        module: the module.
        arguments: arguments of the call.
        options: its keyword arguments.
        forward: the module's own forward.
        divided: function that divided calls compute; it may be a trace of `forward`, which then
            must have its results.
        rows: number of rows of the batch.
        has_rows: for each leaf of (arguments, options) in the order of `tree_flatten`: whether its
            first dimension is as long as the batch, be it by coincidence.

    Raises:
        ComputedWhole: the calls are computed whole, with the reason.
    """
    if not any(has_rows):
        raise ComputedWhole("has no argument with rows")
    # The others may be as long as this batch by coincidence: a matrix of 4 prototypes, a batch of
    # 4.
    alone = tuple(index == has_rows.index(True) for index in range(len(has_rows)))
    refusal: ComputedWhole | None = None
    for cut in dict.fromkeys((has_rows, alone)):
        trial = partial(
            _attempt, module, (forward, divided), tree_flatten((arguments, options)), cut, rows
        )
        try:
            try:
                return _by_parts(partial(trial, torch.float64, 1e-9))
            except (
                _DtypeRefused
            ):  # the tolerance of float32 is one that rounding of a few rows does not reach
                return _by_parts(partial(trial, torch.float32, 1e-4))
        except torch.OutOfMemoryError:
            refusal = refusal or ComputedWhole("does not fit into memory in the trial")
        except ComputedWhole as reason:
            refusal = refusal or reason
    assert refusal is not None
    raise refusal


def _by_parts(attempt: Callable[[tuple[int, ...]], Division]) -> Division:
    try:
        return attempt(_PARTS)
    except torch.OutOfMemoryError:
        parts: tuple[int, ...] = _FEW_PARTS
    except _DtypeRefused:
        raise
    except ComputedWhole:
        parts = _LARGER_PARTS
    return attempt(parts)


def _attempt(
    module: nn.Module,
    forwards: tuple[Callable[..., Any], Callable[..., Any]],
    call: tuple[list[Any], TreeSpec],
    has_rows: tuple[bool, ...],
    rows: int,
    dtype: torch.dtype,
    tolerance: float,
    parts: tuple[int, ...],
) -> Division:
    """Return the division of the call with the leaves of `has_rows` cut into parts."""
    forward, divided = forwards
    tensors = [*module.parameters(), *(leaf for leaf in call[0] if isinstance(leaf, torch.Tensor))]
    device = tensors[0].device
    device_reads.finish(device)  # a trial reads often, and sends nothing
    with sandbox(module, device, dtype):
        setting = Setting(module, divided, call, has_rows, rows, dtype, device)
        division = _compare(setting, parts, tolerance)
        if divided is not forward:
            _require_results_of(forward, setting, sum(parts), tolerance)
        known = list(division.operations)
        if setting.has_plain_masks:
            # It may not accept such masks, or compute something else for them.
            with suppress(_Failed, _OtherKind):
                _compare(setting, parts, tolerance, "masks", known)
        # A quotient can be a mean by chance, and a condition on the largest value be the same in
        # all parts.
        with suppress(_Failed, _OtherKind):
            if _compare(setting, parts, tolerance, "rows", known).outputs != division.outputs:
                raise ComputedWhole("joins samples (outputs differ for other rows)")
    return division


def _compare(
    setting: Setting,
    parts: tuple[int, ...],
    tolerance: float,
    change: Change | None = None,
    known: list[Operation] | None = None,
) -> Division:
    """Compute whole and in parts, compare, and return the division.

    Args:
        setting: the call.
        parts: rows of the parts.
        tolerance: relative tolerance.
        change: change of the rows.
        known: list of operations to be judged; None for any.

    Raises:
        ComputedWhole: whole and parts differ.
    """
    rows = sum(parts)
    setting.select(rows, change)
    whole = Run(setting, 0, rows)
    fewer = Run(setting, 0, min(2, rows - 1))
    work = WorkCounter()
    with _refusing("fails in the trial", setting.dtype, _Failed):
        with whole.turn():
            whole.compute()
        with fewer.turn(), work:
            fewer.compute()
    setting.require_unwritten()
    if known is not None and (whole.operations.functions != known or not whole.is_finite()):
        raise _OtherKind
    factors = _draw_factors(whole, fewer)
    runs = [Run(setting, start, stop, factors) for start, stop in pairwise((0, *accumulate(parts)))]
    with _refusing("fails on a part of the rows", setting.dtype, ComputedWhole):
        slices = [Part(run.compute, run.turn) for run in runs]
        run_in_lockstep(slices, AllHere())
    if change == "rows" and any(run.operations.functions != known for run in runs):
        raise _OtherKind  # a branch on a large value, which ranks compare in each call
    with _refusing("fails in the trial", setting.dtype, _Failed):
        verdict = Verdict(setting, whole, fewer, runs, tolerance)
        outputs = verdict.outputs(compares_numbers=change is None)
    return Division(
        setting.has_rows,
        outputs,
        factors,
        minimum_rows=parts[0],
        sums=len(slices[0].marks),
        operations_per_row=work.operations / fewer.own,
        operations=tuple(whole.operations.functions),
    )


def _require_results_of(
    forward: Callable[..., Any], setting: Setting, rows: int, tolerance: float
) -> None:
    """Require that the function of divided calls has the results and effects of the module's own forward.

    A trace has the attributes and branches of the time when it was made, and no code that is not of
    tensors.

    Raises:
        ComputedWhole: it has not.
    """
    setting.select(rows, None)
    traced = Run(setting, 0, rows)
    own = Run(setting, 0, rows, forward=forward)
    with _refusing("fails in the trial", setting.dtype, _Failed):
        for run in (traced, own):
            with run.turn():
                run.compute()
        Verdict(setting, own, own, [traced], tolerance).require_equal()


@contextmanager
def _refusing(reason: str, dtype: torch.dtype, kind: type[ComputedWhole]) -> Iterator[None]:
    """Turn exceptions of the block into reasons to compute whole; lack of memory is raised unchanged."""
    try:
        yield
    except (ComputedWhole, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # boundary: whatever code of the script raises in a trial means whole
        text = failure(reason, error)
        is_refusal = isinstance(error, RuntimeError) and any(
            word in str(error) for word in _DTYPE_WORDS
        )
        if dtype is torch.float64 and is_refusal:
            raise _DtypeRefused(text) from None
        raise kind(text) from None


def _draw_factors(whole: Run, fewer: Run) -> tuple[int | None, ...]:
    """Return for each random draw how many numbers it has per row, None if it does not depend on the rows."""
    draws = whole.operations.draws
    others = fewer.operations.draws
    if len(draws) != len(others):
        raise ComputedWhole("its number of random draws depends on the rows")
    try:
        pairs = zip(draws, others, strict=True)
        return tuple(rows_factor(shape, other, whole.own, fewer.own) for shape, other in pairs)
    except ValueError as error:
        raise ComputedWhole(f"draws random numbers that do not follow the rows ({error})") from None
