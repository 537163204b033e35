"""Slices of divided products: their sums in one binary tree, and tensors that consist of slices.

The number of slices belongs to the mathematics. The ranks of a tensor axis own consecutive slices,
each computes its own with the shapes and strides of one process, and sums over slices have the
operands of one process: results do not depend on the number of ranks.

Kernels compute the last elements of a tensor in another way than the others, so that an elementwise
function has equal bits only for equal shapes: functions of a divided tensor are applied to each
slice.

Decisions: docs/decisions/layouts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function
from torch.utils._pytree import register_pytree_node, tree_leaves

from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.reduce.exact import ExactReduction, gather_equal
from samestep.view.crossings import crossing
from samestep.view.region import Parts

ALIGNMENT = 64  # bytes, as of new memory on CPUs; matrix products can depend on it


class Slicing:
    """Division of dimensions into `count` slices, and the slices of this rank.

    Args:
        count: number of slices; a multiple of the number of ranks.
        world: ranks of the tensor axis.

    Attributes:
        owned: slices of this rank.
    """

    def __init__(self, count: int, world: World) -> None:
        self.count = count
        self._world = world
        self._sums = ExactReduction(world, count)
        self.owned = self._sums.own

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def ranks(self) -> int:
        return self._world.size

    def divide(self, tensor: torch.Tensor, dim: int) -> Parts:
        """Return this rank's slices of a full tensor, contiguous."""
        parts = tensor.chunk(self.count, dim)
        return tuple(_aligned(parts[number]) for number in self.owned)

    def divide_local(self, tensor: torch.Tensor, dim: int) -> Parts:
        """Return the slices of a tensor that consists of this rank's slices, contiguous."""
        return tuple(_aligned(part) for part in tensor.chunk(len(self.owned), dim))

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the full tensor from the slices of all ranks. A collective."""
        local = torch.cat(list(parts), dim).contiguous()
        world = self._world
        if world.size == 1:
            return local
        every = gather_equal(world, local, range(world.size), "an all-gather of slices")
        return torch.cat(every, dim)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the values of all slices in tree order. A collective."""
        return self._sums.sum(parts)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous, aligned tensor, a copy if need be: bits of products can depend on it."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# Each of these two functions is the derivative of the other one.


def divide(tensor: torch.Tensor, slicing: Slicing) -> Parts:
    """Return this rank's slices of a full tensor along its last dimension."""
    return crossing(
        [tensor],
        lambda full: slicing.divide(full, -1),
        lambda *gradients: [join(gradients, slicing)],
    )


def join(parts: Parts, slicing: Slicing) -> torch.Tensor:
    """Return the full tensor from the slices of all ranks along its last dimension."""
    return crossing(
        parts, lambda *own: [slicing.join(own, -1)], lambda gradient: divide(gradient, slicing)
    )[0]


_EXPECTED = (
    "the divided result of a `column` module passes through elementwise functions to a `row` module"
)
divided_error = partial(
    InputError,
    fix="set step.tensor_plan: column_gathered for the modules before the operation",
    code="E_STRATEGY",
)

# Functions of an element and numbers, and conversions. Each name is looked up in torch,
# torch.Tensor and functional, with and without a trailing underscore.
_NAMES = (
    "abs add celu clamp clamp_max clamp_min clip clone contiguous cos cosh detach div divide elu "
    "erf erfc exp expm1 float bfloat16 half double gelu hardshrink hardsigmoid hardswish hardtanh "
    "leaky_relu log log1p log_sigmoid logsigmoid mish mul multiply neg negative pow reciprocal "
    "relu relu6 rsqrt selu sigmoid sign silu sin sinh softplus softshrink softsign sqrt square sub "
    "subtract tan tanh tanhshrink threshold to true_divide"
)
_SHAPE_NAMES = "size dim ndimension numel stride __len__"
_OF_SHAPE = {getattr(torch.Tensor, name) for name in _SHAPE_NAMES.split()}
_VIEWS = (torch.Tensor.view, torch.Tensor.reshape)
# Operators. Function modes see the methods of `_METHODS` in place of some of them.
_ARITHMETIC = "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow rpow neg abs"
_METHODS = {"add": "add", "radd": "add", "mul": "mul", "rmul": "mul", "sub": "sub"}
_METHODS |= {"truediv": "div", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}
_OTHER_OPERATORS = (
    "eq ne lt le gt ge and or xor invert matmul rmatmul mod floordiv getitem setitem bool float "
    "int iter len"
)
_ELEMENTWISE: set[Any] = {
    getattr(place, name + suffix)
    for place in (torch, torch.Tensor, functional)
    for name in _NAMES.split()
    for suffix in ("", "_")
    if hasattr(place, name + suffix)
} | {getattr(torch.Tensor, f"__{name}__") for name in _ARITHMETIC.split()}


@dataclass(frozen=True, eq=False)
class SlicedTensor:
    """The slices of this rank of a tensor that is divided along its last dimension.

    An operand of torch's functions, but no `torch.Tensor`: libraries handle it as a container of
    its slices.

    Attributes:
        parts: slices of this rank, each on the graph of autograd.
        slicing: the slices of all ranks.
    """

    parts: Parts
    slicing: Slicing

    def join(self) -> torch.Tensor:
        return join(self.parts, self.slicing)

    @property
    def shape(self) -> torch.Size:
        *sizes, last = self.parts[0].shape
        return torch.Size([*sizes, last * self.slicing.count])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return (
            f"SlicedTensor({tuple(self.shape)}, {len(self.parts)} of {self.slicing.count} slices)"
        )

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        if not callable(method):
            raise divided_error(f"{name} of a divided tensor is used", _EXPECTED)
        return partial(_Method(method).dispatch, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, cls | torch.Tensor) for kind in types):
            return NotImplemented  # a divided weight computes the product
        return _call(func, *args, **(kwargs or {}))


class _Method:
    """A method of tensors for divided ones. Function modes take it for the method itself."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.__name__ = method.__name__

    def __hash__(self) -> int:
        return hash(self._method)

    def __eq__(self, other: object) -> bool:
        return bool(other == self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._method, *args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as torch calls it."""
        return handle_torch_function(self, args, *args, **kwargs)


def _operator(name: str) -> Any:
    method = _Method(getattr(torch.Tensor, _METHODS.get(name, f"__{name}__")))
    return lambda *args: method.dispatch(*args)  # noqa: PLW0108  # a function, which the class binds


for _name in (*_ARITHMETIC.split(), *_OTHER_OPERATORS.split()):
    setattr(SlicedTensor, f"__{_name}__", _operator(_name))

register_pytree_node(
    SlicedTensor,
    lambda tensor: (list(tensor.parts), tensor.slicing),
    lambda parts, slicing: SlicedTensor(tuple(parts), slicing),
    serialized_type_name="samestep.SlicedTensor",
)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(func, _Method):
        return func(*args, **kwargs)
    if func is functional.dropout:
        return _dropout(*args, **kwargs)
    if func in _OF_SHAPE:
        # A tensor without memory has the answers of torch for the full shape.
        tensor = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(tensor, *args[1:], **kwargs)
    # Of the full size: rules of draws fill such a tensor with the numbers of one process.
    if func is torch.empty_like:
        return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    if func in _VIEWS:
        return _view(*args)
    name = getattr(func, "__name__", str(func))
    if func not in _ELEMENTWISE:
        raise divided_error(f"{name} is called with a divided tensor", _EXPECTED)
    return _elementwise(func, name, args, kwargs)


def _view(tensor: SlicedTensor, *sizes: Any) -> SlicedTensor:
    """Change the dimensions before the last one, which is the divided one and remains."""
    wanted = sizes if isinstance(sizes[0], int) else sizes[0]
    # Torch itself computes a size of -1, without memory.
    shape = torch.empty(tensor.shape, device="meta").reshape(*wanted).shape
    if shape[-1] != tensor.shape[-1]:
        raise divided_error(
            f"a divided tensor {tuple(tensor.shape)} is viewed as {tuple(shape)}", _EXPECTED
        )
    parts = tuple(part.reshape(*shape[:-1], part.shape[-1]) for part in tensor.parts)
    return SlicedTensor(parts, tensor.slicing)


def _elementwise(
    func: Callable[..., torch.Tensor], name: str, args: Any, kwargs: Any
) -> SlicedTensor:
    values = [*args, *kwargs.values()]
    sliced = [value for value in values if isinstance(value, SlicedTensor)]
    first = sliced[0]

    def parts_of(value: Any) -> Sequence[Any]:
        if not isinstance(value, torch.Tensor | SlicedTensor) or value.dim() == 0:
            return (value,) * len(first.parts)
        if value.shape != first.shape:
            raise divided_error(f"{name} mixes a divided tensor with a plain one", _EXPECTED)
        if isinstance(value, SlicedTensor):
            return value.parts
        return divide(value, first.slicing)  # such as the numbers of a dropout

    positional = list(zip(*map(parts_of, args), strict=True))
    named = {key: parts_of(value) for key, value in kwargs.items()}
    results = tuple(
        func(*positional[i], **{key: parts[i] for key, parts in named.items()})
        for i in range(len(first.parts))
    )
    return SlicedTensor(results, first.slicing)


def _dropout(
    input: SlicedTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> SlicedTensor:
    if not training or p == 0:
        return input
    # Drawn for the full tensor, so that the numbers do not depend on the number of slices.
    mask = functional.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
    masks = input.slicing.divide(mask, -1)
    # `inplace` would save memory alone.
    results = tuple(part * own for part, own in zip(input.parts, masks, strict=True))
    return SlicedTensor(results, input.slicing)


def checked_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`.

    Raises:
        InputError: it returns a divided tensor.
    """
    outputs = forward(*args, **kwargs)
    leaves = tree_leaves(outputs, is_leaf=lambda value: isinstance(value, SlicedTensor))
    if any(isinstance(value, SlicedTensor) for value in leaves):
        raise divided_error("the model returns a divided tensor", _EXPECTED)
    return outputs
