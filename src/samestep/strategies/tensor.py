"""Tensor parallelism in the calls of a module: divided weights stand in the places of parameters during a call.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).

The code of the module runs unchanged: a divided weight is an operand of `linear`, `embedding` and `addmm`, so that a
divided call has the operations of a whole one. Its result is a `SlicedTensor`, or a full tensor where the plan says so.

Decisions: docs/decisions/layouts.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.errors import InputError
from samestep.strategies.random_functions import is_random
from samestep.strategies.tensor_plan import HEADS, divided_dims, head_count, plan_error, resolve_plan
from samestep.strategies.tensor_slices import (
    Parts,
    SlicedTensor,
    Slicing,
    add,
    divide,
    divided_error,
    join,
    spread,
)

_HEAD_DIM = 1  # of scores `(N, heads, T, T)`
_PRODUCTS = (functional.linear, functional.embedding, torch.addmm)
_ATTRIBUTES = ("dtype", "device", "requires_grad", "ndim", "is_cuda", "layout")


@dataclass(frozen=True)
class Place:
    """Place of a divided parameter.

    Attributes:
        module: the module that holds it.
        key: its name there.
        name: its name in the whole model.
        dim: the divided dimension.
        kind: kind of division, as in the plan.
    """

    module: nn.Module
    key: str
    name: str
    dim: int
    kind: str


class DividedWeight:
    """A divided parameter during a call: an operand of torch's functions in place of the parameter."""

    def __init__(self, local: torch.Tensor, place: Place, slicing: Slicing) -> None:
        self.local = local
        self.place = place
        self.slicing = slicing

    def parts(self) -> Parts:
        """Return the slices of this rank."""
        return self.slicing.divide_local(self.local, self.place.dim)

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return full_shape(self.local, self.place.dim, self.slicing)

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self.local, name)
        raise _use_error(name, self.place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)]
        if func not in _PRODUCTS:
            raise _use_error(getattr(func, "__name__", str(func)), weights[0].place)
        return _product(func, list(args), kwargs or {})


def full_shape(local: torch.Tensor, dim: int, slicing: Slicing) -> torch.Size:
    """Return the shape of a full tensor from this rank's part."""
    shape = list(local.shape)
    shape[dim] *= slicing.ranks
    return torch.Size(shape)


def _use_error(name: str, place: Place) -> InputError:
    return divided_error(f"{name} of {place.name}", "a divided parameter is used by its own module alone")


def _product(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the slices of this rank of a product with a divided weight.

    A full tensor is an operand of every slice, and its gradient is the sum over slices in tree order; so is the result
    of a `row`.
    """
    if func is torch.addmm:  # of a transposed weight
        bias, inputs, weight = args
        others: list[Any] = []
    else:
        inputs, weight, *others = args
        bias = None
        if func is functional.linear:
            bias = kwargs.get("bias", *others)
            others = []
            kwargs = {}

    def one(part: torch.Tensor, own: torch.Tensor, own_bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor
        if func is functional.embedding:
            result = functional.embedding(part, own, *others, **kwargs)
        elif func is torch.addmm:
            result = functional.linear(part, own.t(), own_bias)
        else:
            result = functional.linear(part, own, own_bias)
        return result

    if not isinstance(weight, DividedWeight):
        raise divided_error("a product of divided tensors", "a divided parameter is the weight of its module")
    slicing = weight.slicing
    if weight.place.kind == "row":
        parts = _row_inputs(inputs, slicing)
        total = add([one(part, own) for part, own in zip(parts, weight.parts(), strict=True)], slicing)
        return total if bias is None else total + bias.to(total.dtype)
    full = inputs.join() if isinstance(inputs, SlicedTensor) else inputs
    operands: list[Sequence[Any]] = [spread(full, slicing), weight.parts()]
    if bias is not None:
        operands.append(bias.parts())
    results = [one(*own) for own in zip(*operands, strict=True)]
    last = results[0].dim() - 1
    if weight.place.kind == "column":
        return SlicedTensor(tuple(results), slicing, last)
    return join(results, slicing, last)


def _row_inputs(inputs: torch.Tensor | SlicedTensor, slicing: Slicing) -> Parts:
    last = inputs.dim() - 1
    if isinstance(inputs, SlicedTensor) and inputs.divided_dim == last:
        return inputs.parts
    full = inputs.join() if isinstance(inputs, SlicedTensor) else inputs
    return divide(full, slicing, last)


class _Attention:
    """Attention with divided heads: plain tensors of the heads of one slice inside, a divided result.

    Queries, keys and values are `column` modules. The forward must derive the number of heads from tensor sizes, as
    BERT's does. It is called once per slice of this rank.
    """

    def __init__(self, name: str, module: nn.Module, places: Sequence[Place], slicing: Slicing) -> None:
        self.module = module
        self._name = name
        self._places = places
        self._slicing = slicing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module, with divided tensors in place of tensors."""
        values, structure = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, SlicedTensor))
        count = len(self._slicing.owned)
        weights: list[Any] = [place.module._parameters[place.key] for place in self._places]
        with torch._C.DisableTorchFunction():  # no operations of the module
            values = [value.join() if isinstance(value, SlicedTensor) else value for value in values]
            # Queries, keys and values share a copy per slice: their gradients are communicated together.
            copies = [
                spread(value, self._slicing) if isinstance(value, torch.Tensor) else (value,) * count
                for value in values
            ]
            # Once for all slices: a use per slice would add zeros to their gradients.
            parts = [weight.parts() for weight in weights]
        masks: list[Parts] = []
        results = []
        try:
            for number in range(count):
                for place, own in zip(self._places, parts, strict=True):
                    place.module._parameters[place.key] = own[number]
                own_args, own_kwargs = tree_unflatten([copy[number] for copy in copies], structure)
                with _HeadDropout(self._name, head_count(self.module) or 0, self._slicing, masks, number):
                    results.append(type(self.module).forward(self.module, *own_args, **own_kwargs))
        finally:
            for place, weight in zip(self._places, weights, strict=True):
                place.module._parameters[place.key] = weight
        if isinstance(results[0], torch.Tensor):
            return self._as_divided(results)
        columns = zip(*results, strict=True)
        return tuple(self._as_divided(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns)

    def _as_divided(self, parts: Sequence[torch.Tensor]) -> SlicedTensor:
        with torch._C.DisableTorchFunction():
            dim = parts[0].dim()
        return SlicedTensor(tuple(parts), self._slicing, _HEAD_DIM if dim == 4 else dim - 1)


class _HeadDropout(TorchFunctionMode):
    """Dropout of the scores of the heads of one slice with the masks of all heads.

    `masks` are the masks of this rank in the order of calls, drawn in the first slice of this rank. The operations of
    further slices are hidden from other modes: they are those of the first one.
    """

    def __init__(self, name: str, heads: int, slicing: Slicing, masks: list[Parts], number: int) -> None:
        super().__init__()
        self._name = name
        self._heads = heads
        self._slicing = slicing
        self._masks = masks
        self._number = number
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs):
            if func is not functional.dropout:
                raise self._unsupported(func.__name__)
            return self._dropout(*args, **kwargs)
        if self._number == 0:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)

    def _dropout(self, scores: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            shape = list(scores.shape)
            if len(shape) != 4 or shape[_HEAD_DIM] * self._slicing.count != self._heads:
                raise self._unsupported(f"dropout of a tensor {tuple(shape)}")
            shape[_HEAD_DIM] = self._heads
            ones = torch.ones(shape, dtype=scores.dtype, device=scores.device)
        if self._number == 0:  # other modes see this dropout, and draw for the rows that it belongs to
            mask = functional.dropout(ones, *args, **kwargs)
        self._calls += 1
        with torch._C.DisableTorchFunction():
            if self._number == 0:
                self._masks.append(self._slicing.divide(mask, _HEAD_DIM))
            result: torch.Tensor = scores * self._masks[self._calls - 1][self._number]
        return result

    def _unsupported(self, call: str) -> InputError:
        return InputError(
            f"{call} in {self._name}, whose heads are divided",
            expected="the only random function in it is torch.nn.functional.dropout of the scores (N, heads, T, T)",
            fix="use eager attention (attn_implementation: eager), or step.tensor_plan: column_gathered for its layers",
            code="E_TENSOR_PLAN",
        )


class TensorParallel:
    """Division of the matrix products of a module into slices, and of their parameters between ranks, in place.

    All other parameters remain complete and equal on the ranks of the tensor axis, and so do their gradients.

    Args:
        module: the module.
        slicing: slices of all ranks.
        patterns: kinds of division by shell pattern of module names; empty for the built-in plan.

    Attributes:
        places: the divided parameters.
        parameters: the same, by parameter.

    Raises:
        InputError: there is no plan, or the plan does not fit the model or the number of slices.
    """

    def __init__(self, module: nn.Module, slicing: Slicing, patterns: Mapping[str, str]) -> None:
        self.slicing = slicing
        self.places: list[Place] = []
        plan = resolve_plan(module, patterns, slicing.count)
        for name, kind in plan.items():
            if kind == HEADS:
                continue
            part = module.get_submodule(name)
            for key, dim in divided_dims(part, kind).items():
                if part._parameters.get(key) is not None:
                    self.places.append(Place(part, key, f"{name}.{key}", dim, kind))
        self._attentions = [self._attention(module, name, plan) for name, kind in plan.items() if kind == HEADS]
        self.parameters = {self._parameter(place): place for place in self.places}
        for parameter, place in self.parameters.items():
            # Cloned: a view would keep the full tensor in memory.
            parameter.data = self.local_part(place, parameter.data).clone(memory_format=torch.contiguous_format)

    def local_part(self, place: Place, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full parameter, or of its optimizer state, as a view."""
        return full.chunk(self.slicing.ranks, place.dim)[self.slicing.rank]

    def full_tensor(self, place: Place, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a parameter, or of its optimizer state. A collective."""
        return self.slicing.join([local], place.dim)

    @contextmanager
    def divided_weights(self) -> Iterator[None]:
        """Let the module compute with the local parameters, or the tensors in their places, during the block."""
        replaced = []
        for place in self.places:
            value = place.module._parameters[place.key]
            assert value is not None
            replaced.append((place, value))
            weight: Any = DividedWeight(value, place, self.slicing)
            place.module._parameters[place.key] = weight
        for attention in self._attentions:
            attention.module.__dict__["forward"] = attention
        try:
            yield
        finally:
            for attention in self._attentions:
                attention.module.__dict__.pop("forward", None)
            for place, value in replaced:
                place.module._parameters[place.key] = value

    def _attention(self, model: nn.Module, name: str, plan: Mapping[str, str]) -> _Attention:
        """Return an attention; refuse other parameters in it: their gradients would contain the heads of one slice."""
        module = model.get_submodule(name)
        inner = [place for place in self.places if place.name.startswith(f"{name}.") and place.kind == "column"]
        divided = {place.name for place in inner}
        others = sorted(key for key, _ in module.named_parameters(name) if key not in divided)
        if others or not inner:
            raise plan_error(
                f"step.tensor_plan: heads of {name}, which has {others[0] if others else 'no column'}",
                expected="all parameters of an attention with divided heads belong to modules that are `column`",
                fix="set column for its queries, keys and values, or column_gathered for its modules in place of heads",
            )
        if "forward" in vars(module):
            raise plan_error(
                f"{name}, which step.tensor_plan divides, has a forward of its own",
                expected="the forward of its class",
                fix="set column_gathered for its modules in place of heads",
            )
        return _Attention(name, module, inner, self.slicing)

    @staticmethod
    def _parameter(place: Place) -> nn.Parameter:
        parameter = place.module._parameters[place.key]
        assert parameter is not None
        return parameter
