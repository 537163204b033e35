"""Trial of a kind of calls: a few rows, computed whole and in parts, in this process alone.

The judge computes in float64, with parameters that are moved a little, so that zeros are not zero,
and with rows in another order. Its tolerance is a constant. Every rank has the same whole batch and
so comes to the same verdict. A trial leaves no trace, whatever the code of the script does.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from samestep.distributed.device_reads import device_reads
from samestep.distributed.kernels import tf32_off
from samestep.distributed.rng import preserved_generators
from samestep.view.module_tensors import ModuleState
from samestep.view.operations import Operation
from samestep.view.recomputation import checkpointing_off
from samestep.view.slice_threads import AllHere, Part, run_in_lockstep
from samestep.view.trial_comparison import Verdict, rows_factor
from samestep.view.trial_result import ComputedWhole, Division, failure
from samestep.view.trial_run import Change, Run, Setting
from samestep.view.worth_dividing import WorkCounter

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
    call = tree_flatten((arguments, options))
    # Others may be as long as this batch by coincidence: a matrix of 4 prototypes, a batch of 4.
    alone = tuple(index == has_rows.index(True) for index in range(len(has_rows)))
    refusal: ComputedWhole | None = None
    for cut in dict.fromkeys((has_rows, alone)):
        attempt = partial(_attempt, module, (forward, divided), call, cut, rows)
        try:
            try:
                return _by_parts(partial(attempt, torch.float64, 1e-9))
            except _DtypeRefused:
                # A tolerance of float32 that rounding of a few rows does not reach.
                return _by_parts(partial(attempt, torch.float32, 1e-4))
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
    # Before the base class: another precision helps, other parts do not.
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
    with _sandbox(module, device, dtype):
        setting = Setting(module, divided, call, has_rows, rows, dtype, device)
        division = _compare(setting, parts, tolerance)
        if divided is not forward:
            # A trace has the attributes and branches of the time when it was made, and no code
            # that is not of tensors.
            setting.select(sum(parts), None)
            traced = Run(setting, 0, sum(parts))
            own = Run(setting, 0, sum(parts), forward=forward)
            with _refusing("fails in the trial", dtype, _Failed):
                for run in (traced, own):
                    with run.turn():
                        run.compute()
                Verdict(setting, own, own, [traced], tolerance).require_equal()
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
    # A second number of rows: dimensions, draws and numbers either follow the rows or do not.
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


def _draw_factors(whole: Run, fewer: Run) -> tuple[int | None, ...]:
    """Return for each draw its numbers per row; None if their count does not depend on the rows."""
    draws = whole.operations.draws
    others = fewer.operations.draws
    if len(draws) != len(others):
        raise ComputedWhole("its number of random draws depends on the rows")
    try:
        pairs = zip(draws, others, strict=True)
        return tuple(rows_factor(shape, other, whole.own, fewer.own) for shape, other in pairs)
    except ValueError as error:
        raise ComputedWhole(f"draws random numbers that do not follow the rows ({error})") from None


@contextmanager
def _refusing(reason: str, dtype: torch.dtype, kind: type[ComputedWhole]) -> Iterator[None]:
    """Turn exceptions of the block into reasons to compute whole, except for lack of memory."""
    try:
        yield
    except (ComputedWhole, torch.OutOfMemoryError):
        raise
    except Exception as error:  # boundary: whatever code of the script raises here means whole
        names_dtype = any(word in str(error) for word in _DTYPE_WORDS)
        if dtype is torch.float64 and isinstance(error, RuntimeError) and names_dtype:
            kind = _DtypeRefused
        raise kind(failure(reason, error)) from None


@contextmanager
def _sandbox(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Restore the module, generators and settings of torch after the block, and mute it.

    Inside, activation checkpointing and compiled code are off, the default dtype is `dtype`, and
    autocast is off.
    """
    with ExitStack() as stack:
        stack.callback(ModuleState(module, hooks=True).restore)
        stack.enter_context(preserved_generators(device))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.set_default_dtype(dtype)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        # TF32 rounds more than the tolerance of float32.
        stack.enter_context(tf32_off())
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(sys.maxsize)
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(checkpointing_off())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled; the import is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for kind in {"cpu", device.type}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
