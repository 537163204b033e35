"""Results of divided modules: the slices of this rank, with elementwise functions and dropout.

Kernels compute the last elements of a tensor in another way than the others, so that an elementwise function has equal
bits only for equal shapes: functions are applied to each slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import register_pytree_node

from samestep.errors import InputError
from samestep.strategies.random_functions import dropout_mask
from samestep.strategies.slicing import Slicing, join

_EXPECTED = "the divided result of a `column` module passes through elementwise functions to a `row` module"
divided_error = partial(
    InputError,
    fix="set step.tensor_plan: column_gathered for the modules before the operation",
    code="E_DIVIDED_TENSOR",
)

# Functions of an element and numbers, and conversions. Each name is looked up in torch, torch.Tensor and functional,
# with and without a trailing underscore.
_NAMES = (
    "abs add celu clamp clamp_max clamp_min clip clone contiguous cos cosh detach div divide elu erf erfc exp expm1 "
    "float bfloat16 half double gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log log1p log_sigmoid "
    "logsigmoid mish mul multiply neg negative pow reciprocal relu relu6 rsqrt selu sigmoid sign silu sin sinh "
    "softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to true_divide"
)
_ARITHMETIC = "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow rpow neg abs"
_OTHER_OPERATORS = "eq ne lt le gt ge and or xor invert matmul rmatmul mod floordiv getitem setitem bool float int iter"
_ELEMENTWISE: set[Any] = {
    getattr(place, name + suffix)
    for place in (torch, torch.Tensor, functional)
    for name in _NAMES.split()
    for suffix in ("", "_")
    if hasattr(place, name + suffix)
} | {getattr(torch.Tensor, f"__{name}__") for name in _ARITHMETIC.split()}


@dataclass(frozen=True, eq=False)
class SlicedTensor:
    """The slices of this rank of a tensor that is divided along one dimension.

    An operand of torch's functions, but no `torch.Tensor`: libraries handle it as a container of its slices.

    Attributes:
        parts: slices of this rank, each on the graph of autograd.
        slicing: the slices of all ranks.
        divided_dim: the dimension that is divided.
    """

    parts: tuple[torch.Tensor, ...]
    slicing: Slicing
    divided_dim: int

    def join(self) -> torch.Tensor:
        """Return the full tensor on every rank. A collective."""
        return join(self.parts, self.slicing, self.divided_dim)

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        sizes = list(self.parts[0].shape)
        sizes[self.divided_dim] *= self.slicing.count
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the slices."""
        return self.parts[0].device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the full tensor, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SlicedTensor({tuple(self.shape)}, {len(self.parts)} of {self.slicing.count} slices)"

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if not callable(method):
            raise divided_error(f"{name} of a divided tensor is used", _EXPECTED)
        return partial(_call, method, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, *args, **(kwargs or {}))


def _operator(name: str) -> Any:
    method = getattr(torch.Tensor, name)
    return lambda *args: _call(method, *args)


for _name in (*_ARITHMETIC.split(), *_OTHER_OPERATORS.split()):
    setattr(SlicedTensor, f"__{_name}__", _operator(f"__{_name}__"))

register_pytree_node(
    SlicedTensor,
    lambda tensor: (list(tensor.parts), (tensor.slicing, tensor.divided_dim)),
    lambda parts, context: SlicedTensor(tuple(parts), *context),
    serialized_type_name="samestep.SlicedTensor",
)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    if func is functional.dropout:
        return _dropout(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func not in _ELEMENTWISE:
        raise divided_error(f"{name} is called with a divided tensor", _EXPECTED)
    return _elementwise(func, name, args, kwargs)


def _elementwise(func: Callable[..., torch.Tensor], name: str, args: Any, kwargs: Any) -> SlicedTensor:
    values = [*args, *kwargs.values()]
    sliced = [value for value in values if isinstance(value, SlicedTensor)]
    first = sliced[0]
    for value in values:
        is_tensor = isinstance(value, torch.Tensor | SlicedTensor) and value.dim() > 0
        if is_tensor and not (isinstance(value, SlicedTensor) and value.shape == first.shape):
            raise divided_error(f"{name} mixes a divided tensor with a plain one", _EXPECTED)

    def part(value: Any, number: int) -> Any:
        return value.parts[number] if isinstance(value, SlicedTensor) else value

    results = tuple(
        func(*(part(value, i) for value in args), **{key: part(value, i) for key, value in kwargs.items()})
        for i in range(len(first.parts))
    )
    return SlicedTensor(results, first.slicing, first.divided_dim)


def _dropout(input: SlicedTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> SlicedTensor:
    if not training or p == 0:
        return input
    mask = dropout_mask(input.shape, p, dtype=input.dtype, device=input.device)
    masks = input.slicing.divide(mask, input.divided_dim)
    results = tuple(part * own for part, own in zip(input.parts, masks, strict=True))
    return SlicedTensor(results, input.slicing, input.divided_dim)


def checked_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`.

    Raises:
        InputError: it returns a divided tensor.
    """
    outputs = forward(*args, **kwargs)
    if any(isinstance(value, SlicedTensor) for value in _leaves(outputs)):
        raise divided_error("the model returns a divided tensor", _EXPECTED)
    return outputs


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value
