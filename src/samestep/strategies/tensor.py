"""Tensor parallelism in the calls of a module: divided weights stand in the places of parameters during a call.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019).

The code of the module runs unchanged: a divided weight is an operand of `linear`, `embedding` and
`addmm`, so that a divided call has the operations of a whole one. Its result is a `SlicedTensor`,
or a full tensor by the plan.

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

from samestep.errors import InputError
from samestep.strategies.tensor_plan import divided_dims, resolve_plan
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
    return divided_error(
        f"{name} of {place.name}", "a divided parameter is used by its own module alone"
    )


def _product(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the slices of this rank of a product with a divided weight.

    A full tensor is an operand of every slice, and its gradient is the sum over slices in tree
    order; so is the result of a `row`.
    """
    bias = None
    if func is torch.addmm:  # of a transposed weight
        bias, inputs, weight = args
    elif func is functional.linear:
        inputs, weight, *others = args
        bias = kwargs.get("bias", *others)
    else:
        inputs, weight, *others = args

    def one(
        part: torch.Tensor, own: torch.Tensor, own_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if func is not functional.embedding:
            if func is torch.addmm:
                own = own.t()
            return functional.linear(part, own, own_bias)
        result: torch.Tensor = functional.embedding(part, own, *others, **kwargs)
        return result

    if not isinstance(weight, DividedWeight):
        raise divided_error(
            "a product of divided tensors", "a divided parameter is the weight of its module"
        )
    slicing = weight.slicing
    if weight.place.kind == "row":
        parts = inputs.parts if isinstance(inputs, SlicedTensor) else divide(inputs, slicing)
        total = add(
            [one(part, own) for part, own in zip(parts, weight.parts(), strict=True)], slicing
        )
        if bias is None:
            return total
        return total + bias.to(total.dtype)
    full = inputs.join() if isinstance(inputs, SlicedTensor) else inputs
    operands: list[Sequence[Any]] = [spread(full, slicing), weight.parts()]
    if bias is not None:
        operands.append(bias.parts())
    results = tuple(one(*own) for own in zip(*operands, strict=True))
    if weight.place.kind == "column":
        return SlicedTensor(results, slicing)
    return join(results, slicing)


class TensorParallel:
    """Division of the matrix products of a module into slices, and of their parameters between ranks, in place.

    All other parameters remain complete and equal on the ranks of the tensor axis, and so do their
    gradients.

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
            part = module.get_submodule(name)
            for key, dim in divided_dims(part, kind).items():
                if part._parameters.get(key) is not None:
                    self.places.append(Place(part, key, f"{name}.{key}", dim, kind))
        self.parameters = {self._parameter(place): place for place in self.places}
        for parameter, place in self.parameters.items():
            # Cloned: a view would keep the full tensor in memory.
            parameter.data = self.local_part(place, parameter.data).clone(
                memory_format=torch.contiguous_format
            )

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
        try:
            yield
        finally:
            for place, value in replaced:
                place.module._parameters[place.key] = value

    @staticmethod
    def _parameter(place: Place) -> nn.Parameter:
        parameter = place.module._parameters[place.key]
        assert parameter is not None
        return parameter
