"""Verdict of a trial: whether the whole run and the parts did the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten

from samestep.view.module_tensors import TABLES
from samestep.view.trial_result import ComputedWhole, Output
from samestep.view.trial_run import Run, Setting

_ABSENT = object()


def rows_factor(
    whole: Sequence[int], fewer: Sequence[int], rows: int, fewer_rows: int
) -> int | None:
    """Return how often the first dimension has the rows; None if the shape does not depend on them.

    Args:
        whole: shape with `rows` rows.
        fewer: shape with `fewer_rows` rows.
        rows: number of rows.
        fewer_rows: a smaller number of rows.

    Raises:
        ValueError: the shape depends on the rows in another way.
    """
    if tuple(whole) == tuple(fewer):
        return None
    if len(whole) == len(fewer) and tuple(whole[1:]) == tuple(fewer[1:]):
        factor = whole[0] // rows
        if (whole[0], fewer[0]) == (factor * rows, factor * fewer_rows):
            return factor
    raise ValueError(f"{tuple(whole)} becomes {tuple(fewer)} with {fewer_rows} rows")


class Verdict:
    """Comparison of a whole run with the parts."""

    def __init__(
        self, setting: Setting, whole: Run, fewer: Run, parts: Sequence[Run], tolerance: float
    ) -> None:
        self._setting = setting
        self._whole = whole
        self._fewer = fewer
        self._parts = parts
        self._tolerance = tolerance

    def outputs(self, *, compares_numbers: bool) -> tuple[Output, ...]:
        """Return how the outputs of parts are put together.

        Args:
            compares_numbers: whether numbers taken out of tensors must be equal. Conditions on any
                or all values, which differ for other rows, are compared in each call.

        Raises:
            ComputedWhole: something differs.
        """
        runs = [self._fewer, *self._parts]
        whole = self._whole
        if any(run.operations.functions != whole.operations.functions for run in runs):
            raise ComputedWhole("its operations depend on the rows")
        # Before the comparison of outputs leaf by leaf.
        if any(run.structure != whole.structure for run in runs):
            raise ComputedWhole("the structure of its outputs depends on the rows")
        self._compare_generators()
        numbers = whole.operations.numbers
        if compares_numbers and not all(
            _same_value(numbers, part.operations.numbers, self._tolerance) for part in self._parts
        ):
            raise ComputedWhole("takes numbers out of tensors that depend on the rows")
        self._compare_written()
        outputs = tuple(self._output(number) for number in range(len(whole.outputs)))
        if self._setting.grad:
            self._compare_gradients(outputs)
        return outputs

    def require_equal(self) -> None:
        """Require that the only part, a trace with all rows, does the same as the whole run.

        Raises:
            ComputedWhole: it has not.
        """
        (part,) = self._parts
        is_equal = part.structure == self._whole.structure and _same_value(
            self._whole.outputs, part.outputs, self._tolerance
        )
        try:
            self._compare_generators()
            self._compare_written()
        except ComputedWhole:
            is_equal = False
        if not is_equal:
            raise ComputedWhole("its traced stages compute something else")

    def _compare_generators(self) -> None:
        for part in self._parts:
            if part.generators[:6] != self._whole.generators[:6]:  # those of Python and NumPy
                raise ComputedWhole("draws random numbers per row outside of torch")
            if part.generators != self._whole.generators:
                raise ComputedWhole("draws random numbers that depend on the rows")

    def _compare_written(self) -> None:
        for part in self._parts:
            names: dict[int, str] = {}  # of the attributes that hold containers, by identity
            pairs = zip(self._whole.state.contents, part.state.contents, strict=True)
            for (container, whole), (_, own) in pairs:
                wholes = _by_key(whole)
                owns = _by_key(own)
                for key in {**wholes, **owns}:
                    name = names.get(id(container), str(key))
                    one = wholes.get(key, _ABSENT)
                    if not _same_value(one, owns.get(key, _ABSENT), self._tolerance):
                        raise ComputedWhole(f"writes {name} differently for a part of the rows")
                    if name not in TABLES:
                        names[id(one)] = name

    def _output(self, number: int) -> Output:
        whole = self._whole.outputs[number]
        fewer = self._fewer.outputs[number]
        parts = [part.outputs[number] for part in self._parts]
        if not isinstance(whole, torch.Tensor):
            return self._output_value(number)
        if not all(isinstance(part, torch.Tensor) for part in (fewer, *parts)):
            raise ComputedWhole("the types of its outputs depend on the rows")
        if any(part.requires_grad != whole.requires_grad for part in parts):
            raise ComputedWhole("joins samples (outputs that require gradients differ)")
        if whole.layout is not torch.strided:
            raise ComputedWhole("returns a sparse tensor")
        # NaN is equal to NaN: such outputs would hide every difference.
        if whole.is_floating_point() and whole.numel() and bool(whole.isnan().all()):
            raise ComputedWhole("returns only NaN in the trial")
        try:
            factor = rows_factor(whole.shape, fewer.shape, self._setting.rows, self._fewer.own)
        except ValueError as error:
            text = f"returns a tensor whose size does not follow the rows ({error})"
            raise ComputedWhole(text) from None
        if factor is None:
            return Output(self._kind_without_rows(whole, parts))
        for part, run in zip(parts, self._parts, strict=True):
            if tuple(part.shape) != (factor * run.own, *whole.shape[1:]):
                raise ComputedWhole("joins samples (shapes of outputs differ)")
        if not _close(whole, torch.cat(parts), self._scale([whole])):
            raise ComputedWhole("joins samples (outputs differ)")
        return Output("rows", factor)

    def _output_value(self, number: int) -> Output:
        """Return how an output is put together that is no tensor."""
        whole = self._whole.outputs[number]
        runs = (self._fewer, *self._parts)
        if all(_same_value(whole, run.outputs[number], self._tolerance) for run in runs):
            return Output("value")
        if type(whole) is int and whole % self._setting.rows == 0:
            factor = whole // self._setting.rows
            if all(run.outputs[number] == factor * run.own for run in runs):
                return Output("count", factor)
        raise ComputedWhole("returns a value that depends on the rows")

    def _kind_without_rows(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Any:
        if any(part.shape != whole.shape or part.dtype != whole.dtype for part in parts):
            raise ComputedWhole("joins samples (shapes of outputs differ)")
        # Of the parts too: large ones can cancel each other in a sum.
        tolerance = self._scale([whole, *parts])
        stacked = torch.stack(list(parts)).detach()
        constant = all(_close(whole, part, tolerance) for part in parts)
        total = stacked.sum(0).to(whole.dtype)
        added = whole.dtype != torch.bool and _close(whole, total, tolerance)
        if constant and added and not whole.dim():
            # Zero in all parts: mean, sum and constant are equal.
            raise ComputedWhole("returns a scalar that is zero in the trial")
        # A scalar that is equal in all parts may be a mean, which is right for constants too.
        if constant and (whole.dim() or not _has_fractions(whole)):
            return "constant"
        if _has_fractions(whole):
            shares = [part.own / self._setting.rows for part in self._parts]
            weights = torch.tensor(shares, dtype=whole.dtype).to(whole.device)
            if _close(whole, torch.tensordot(weights, stacked, 1), tolerance):
                return "mean"
        if added:
            return "sum"
        raise ComputedWhole("joins samples (outputs without rows differ)")

    def _compare_gradients(self, outputs: Sequence[Output]) -> None:
        """Compare gradients of random cotangents of the outputs."""
        # Not ones: the gradient of a sum over a softmax, or of normalized values, is zero.
        cotangents: dict[int, torch.Tensor] = {}
        # On the CPU: all ranks and devices have the same numbers, and so the same verdict.
        generator = torch.Generator().manual_seed(len(outputs))
        for number, leaf in enumerate(self._whole.outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                numbers = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
                cotangents[number] = numbers.to(leaf.device, leaf.dtype)
        parameters = [one for one in self._setting.parameters if one.requires_grad]
        inputs = list(self._whole.wanted)
        if not cotangents or not (parameters or inputs):
            return
        whole = _gradients([self._whole], parameters, [cotangents])
        own_cotangents = []
        for part in self._parts:
            own = {n: self._own(one, outputs[n], *part.span) for n, one in cotangents.items()}
            own_cotangents.append(own)
        divided = _gradients(self._parts, parameters, own_cotangents)
        count = len(parameters)
        # One scale for all: the gradient of a bias before batch norm is nothing but rounding.
        scale = self._scale(whole[:count])
        for one, other in zip(whole[:count], divided[:count], strict=True):
            self._compare_gradient(one, other, scale, "parameters")
        for position, number in enumerate(inputs, start=count):
            gradient = whole[position]
            joined = self._joined(number, divided[position :: len(inputs)])
            self._compare_gradient(gradient, joined, self._scale([gradient]), "inputs")

    def _own(self, cotangent: torch.Tensor, output: Output, start: int, stop: int) -> torch.Tensor:
        """Return the cotangent of a part of an output."""
        if output.kind == "rows":
            return cotangent[output.factor * start : output.factor * stop]
        if output.kind == "sum":
            return cotangent
        # As `OutputCrossing` weights the gradients of means and constants.
        return cotangent * ((stop - start) / self._setting.rows)

    def _joined(self, number: int, pieces: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the gradient of an input from those of the parts."""
        if all(piece is None for piece in pieces):
            return None
        filled = [
            torch.zeros_like(part.wanted[number]) if piece is None else piece
            for part, piece in zip(self._parts, pieces, strict=True)
        ]
        if self._setting.has_rows[number]:
            return torch.cat(filled)
        return torch.stack(filled).sum(0)

    def _compare_gradient(
        self, whole: torch.Tensor | None, divided: torch.Tensor | None, scale: float, name: str
    ) -> None:
        if whole is None and divided is None:
            return
        if whole is None or divided is None or not _close(whole, divided, scale):
            raise ComputedWhole(f"joins samples (gradients of {name} differ)")
        if whole.layout is torch.strided and bool(whole.isnan().any()):
            raise ComputedWhole("has gradients that are NaN in the trial")

    def _scale(self, tensors: Sequence[torch.Tensor | None]) -> float:
        return self._tolerance * _largest(tensors)


def _gradients(
    runs: Sequence[Run],
    parameters: Sequence[torch.Tensor],
    cotangents: Sequence[dict[int, torch.Tensor]],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the parameters, summed over runs, and of the inputs of each run."""
    outputs = [run.outputs[i] for run, own in zip(runs, cotangents, strict=True) for i in own]
    inputs = [*parameters, *(tensor for run in runs for tensor in run.wanted.values())]
    seeds = [cotangent for own in cotangents for cotangent in own.values()]
    gradients: tuple[Any, ...] = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
    return gradients


# --- comparison of tensors, numbers and attributes ------------------------------------------------


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest absolute finite value of all tensors, 0 without one."""
    values = [0.0]
    for tensor in tensors:
        if tensor is not None and tensor.numel() and _has_fractions(tensor):
            magnitude = _dense(tensor).abs()
            value = float(magnitude.max())
            if not isfinite(value):
                # Only then, since this takes further passes over the tensor.
                value = float(torch.where(magnitude.isfinite(), magnitude, 0).max())
            values.append(value)
    return max(values)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return tensor
    return tensor.to_dense()


def _close(whole: torch.Tensor, divided: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors have the same shape, dtype, and values up to an absolute tolerance.

    NaN is equal to NaN, and an infinity to the same infinity. Integers and booleans are equal
    exactly.
    """
    if whole.shape != divided.shape or whole.dtype != divided.dtype:
        return False
    if whole.layout != divided.layout:
        return False
    whole = _dense(whole)
    divided = _dense(divided)
    if not _has_fractions(whole):
        return torch.equal(whole, divided)
    # Before `allclose`, which is slower. The comparison is false for NaN.
    if not whole.numel() or float((whole - divided).abs().max()) <= tolerance:
        return True
    return torch.allclose(whole, divided, rtol=0.0, atol=tolerance, equal_nan=True)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_value(whole: Any, divided: Any, tolerance: float) -> bool:
    """Whether two values or containers are equal, relative to the largest number of each leaf."""
    if whole is divided:
        return True
    leaves, spec = tree_flatten(whole)
    others, other_spec = tree_flatten(divided)
    return spec == other_spec and all(
        _same_leaf(*pair, tolerance) for pair in zip(leaves, others, strict=True)
    )


def _same_leaf(whole: Any, divided: Any, tolerance: float) -> bool:
    if whole is divided:
        return True
    if type(whole) is not type(divided):
        return False
    if isinstance(whole, weakref.ref):
        return _same_value(whole(), divided(), tolerance)
    if isinstance(whole, float | complex | numpy.ndarray | numpy.generic):
        # Objects have no distance that a tolerance could limit.
        if isinstance(whole, numpy.ndarray) and whole.dtype == object:
            return False
        whole = torch.tensor(whole)
        divided = torch.tensor(divided)
    if isinstance(whole, torch.Tensor):
        return _close(whole, divided, tolerance * _largest([whole]))
    return bool(whole == divided)


def _by_key(content: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    if isinstance(content, dict):
        return content
    return dict(enumerate(content))
