"""Trial of a kind of calls: a few rows, computed whole and in parts, in this process alone, without a trace.

The judge computes in float64, with parameters that are moved a little, so that zeros are not zero, and with rows in
another order. Its tolerance is a constant. Every rank has the same whole batch and so comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from samestep.distributed.rng import seed_generators
from samestep.view.division import ComputedWhole, Division, failure
from samestep.view.lockstep import AllHere, Part, run_in_lockstep
from samestep.view.operations import Operation
from samestep.view.sandbox import sandbox
from samestep.view.size import WorkCounter
from samestep.view.trial_run import Change, Run, Setting
from samestep.view.verdict import Verdict, rows_factor

# Kernels that refuse float64 are judged in float32, with a tolerance that rounding of a few rows does not reach.
_PRECISIONS = ((torch.float64, 1e-9), (torch.float32, 1e-4))
_DTYPE_WORDS = ("'Double'", "double", "Double", "dtype", "float64", "data type", "scalar type")


class _DtypeRefused(ComputedWhole):
    """An operation does not compute in this precision."""


class _Failed(ComputedWhole):
    """The whole call fails with the rows of the trial."""


class _OtherKind(ComputedWhole):
    """The whole call has other operations with other masks."""


@dataclass(frozen=True)
class _Plan:
    """Numbers of rows of the parts."""

    parts: tuple[int, ...]
    minimum: int

    @property
    def rows(self) -> int:
        return sum(self.parts)

    @property
    def fewer(self) -> int:
        """Number of rows of the second whole run."""
        return min(2, self.rows - 1)

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + part)
        return list(pairwise(ends))


_PLAN = _Plan((1, 2, 3), minimum=1)
# Three parts, since a quotient of two parts can be their mean by chance.
_LARGER_PARTS = _Plan((2, 2, 3), minimum=2)
_OTHER_DRAWS = 5  # seed
_LITTLE_MEMORY = _Plan((1, 1), minimum=1)


def try_division(
    module: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    *,
    forward: Callable[..., Any],
    rows: int,
    has_rows: tuple[bool, ...],
) -> Division:
    """Compare a whole with a divided call and return how calls of this kind are divided.

    Args:
        module: the module.
        arguments: arguments of the call.
        options: its keyword arguments.
        forward: the module's own forward.
        rows: number of rows of the batch.
        has_rows: for each leaf of (arguments, options) in the order of `tree_flatten`: whether its first dimension is
            as long as the batch, be it by coincidence.

    Raises:
        ComputedWhole: the calls are computed whole, with the reason.
    """
    if not any(has_rows):
        raise ComputedWhole("has no argument with rows")
    trial = _Trial(module, arguments, options, forward, rows)
    try:
        return trial.judge(has_rows)
    except ComputedWhole as refusal:
        if sum(has_rows) < 2:
            raise
        # The others may be as long as this batch by coincidence: a matrix of 4 prototypes, a batch of 4.
        first = has_rows.index(True)
        alone = tuple(index == first for index in range(len(has_rows)))
        try:
            return trial.judge(alone)
        except ComputedWhole:
            raise refusal from None


class _Trial:
    """A call that is tried."""

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        forward: Callable[..., Any],
        rows: int,
    ) -> None:
        self._module = module
        self._forward = forward
        self._rows = rows
        self._leaves, self._structure = tree_flatten((arguments, options))
        tensors = [*module.parameters(), *(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))]
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def judge(self, has_rows: tuple[bool, ...]) -> Division:
        """Return the division of the call with these leaves cut into rows."""
        for dtype, tolerance in _PRECISIONS:
            try:
                return self._by_plan(has_rows, dtype, tolerance)
            except _DtypeRefused as refusal:
                reason = str(refusal)
        raise ComputedWhole(reason)

    def _by_plan(self, has_rows: tuple[bool, ...], dtype: torch.dtype, tolerance: float) -> Division:
        try:
            return self._attempt(_PLAN, has_rows, dtype, tolerance)
        except torch.OutOfMemoryError:
            plan = _LITTLE_MEMORY
        except _DtypeRefused:
            raise
        except ComputedWhole:
            plan = _LARGER_PARTS
        try:
            return self._attempt(plan, has_rows, dtype, tolerance)
        except torch.OutOfMemoryError:
            raise ComputedWhole("does not fit into memory in the trial") from None

    def _attempt(self, plan: _Plan, has_rows: tuple[bool, ...], dtype: torch.dtype, tolerance: float) -> Division:
        def compare(
            plan: _Plan, change: Change | None = None, known: list[Operation] | None = None
        ) -> tuple[Division, Setting, Run]:
            with sandbox(self._module, self._device, dtype):
                if change == "rows":
                    seed_generators(_OTHER_DRAWS, self._device)
                setting = Setting(
                    self._module,
                    self._forward,
                    (self._leaves, self._structure),
                    has_rows,
                    self._rows,
                    plan.rows,
                    dtype,
                    self._device,
                    change=change,
                )
                return _compared(setting, plan, dtype, tolerance, known)

        division, setting, whole = compare(plan)
        known = whole.operations.functions
        if setting.has_plain_masks:
            # It may not accept such masks, or compute something else for them.
            with suppress(_Failed, _OtherKind):
                compare(plan, "masks", known)
        # A quotient can be a mean by chance, and a condition on the largest value be the same in all parts.
        has_sums = any(output.kind in ("mean", "sum") for output in division.outputs)
        other_plan = plan
        if plan.minimum == 1 and not has_sums:
            other_plan = _LITTLE_MEMORY
        with suppress(_Failed, _OtherKind):
            other, _, _ = compare(other_plan, "rows", known)
            if other.outputs != division.outputs:
                raise ComputedWhole("joins samples (outputs differ for other rows)")
        return division


def _compared(
    setting: Setting, plan: _Plan, dtype: torch.dtype, tolerance: float, known: list[Operation] | None
) -> tuple[Division, Setting, Run]:
    """Compute whole and in parts, and compare.

    Args:
        setting: the call.
        plan: numbers of rows.
        dtype: precision.
        tolerance: relative tolerance.
        known: list of operations to be judged; None for any.

    Raises:
        ComputedWhole: whole and parts differ.
    """
    whole = Run(setting, 0, plan.rows)
    fewer = Run(setting, 0, plan.fewer)
    work = WorkCounter()
    with _refusing("fails in the trial", dtype, _Failed):
        with whole.turn():
            whole.compute()
        with fewer.turn(), work:
            fewer.compute()
    setting.require_unwritten()
    if known is not None and (whole.operations.functions != known or not whole.is_finite()):
        raise _OtherKind
    factors = _draw_factors(whole, fewer, plan)
    runs = [Run(setting, start, stop, factors) for start, stop in plan.spans]
    with _refusing("fails on a part of the rows", dtype, ComputedWhole):
        parts = [Part(run.compute, run.turn) for run in runs]
        run_in_lockstep(parts, AllHere())
    if setting.change == "rows" and any(run.operations.functions != known for run in runs):
        raise _OtherKind  # a branch on a large value, which ranks compare in each call
    with _refusing("fails in the trial", dtype, _Failed):
        outputs = Verdict(setting, whole, fewer, runs, tolerance).outputs()
    operations_per_row = work.operations / plan.fewer
    division = Division(
        setting.has_rows,
        outputs,
        factors,
        plan.minimum,
        has_sums=parts[0].has_joined,
        operations_per_row=operations_per_row,
        operations=tuple(whole.operations.functions),
    )
    return division, setting, whole


@contextmanager
def _refusing(reason: str, dtype: torch.dtype, kind: type[ComputedWhole]) -> Iterator[None]:
    """Turn exceptions of the block into reasons to compute whole; lack of memory is raised unchanged."""
    try:
        yield
    except (ComputedWhole, torch.OutOfMemoryError):
        raise
    except Exception as error:  # boundary: whatever code of the script raises in a trial means whole
        text = failure(reason, error)
        is_refusal = isinstance(error, RuntimeError) and any(word in str(error) for word in _DTYPE_WORDS)
        if dtype is torch.float64 and is_refusal:
            raise _DtypeRefused(text) from None
        raise kind(text) from None


def _draw_factors(whole: Run, fewer: Run, plan: _Plan) -> tuple[int | None, ...]:
    """Return for each random draw how many numbers it has per row, None if it does not depend on the rows."""
    draws = whole.operations.draws
    others = fewer.operations.draws
    if len(draws) != len(others):
        raise ComputedWhole("its number of random draws depends on the rows")
    try:
        return tuple(
            rows_factor(shape, other, plan.rows, plan.fewer) for shape, other in zip(draws, others, strict=True)
        )
    except ValueError as error:
        raise ComputedWhole(f"draws random numbers that do not follow the rows ({error})") from None
