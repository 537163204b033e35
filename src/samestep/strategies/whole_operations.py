"""Operations on divided parameters outside of calls, as the script's penalties, norms and optimizers have them.

A sum of a divided tensor is, for torch, a part of the sum on each rank: `.item()` would return the
part, and the order of the additions would depend on the number of ranks. Random numbers would be
drawn once more on each rank. Here such operations compute with gathered tensors, on every rank the
same, and results that are numbers are complete.

Private: the dispatcher of DTensors of torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, debug
from torch.utils._pytree import tree_leaves, tree_map

from samestep.errors import RunError
from samestep.strategies.tensor_division import Division

# Element by element, with the same rounding in vectors and outside of them; of float32 and float64
# only.
_ARITHMETIC = frozenset(
    {
        *(
            "abs",
            "add",
            "addcdiv",
            "addcmul",
            "clamp",
            "clamp_max",
            "clamp_min",
            "div",
            "eq",
            "ge",
            "gt",
        ),
        *(
            "isfinite",
            "isnan",
            "le",
            "lerp",
            "logical_and",
            "logical_not",
            "lt",
            "maximum",
            "minimum",
            "mul",
            "ne",
        ),
        *("neg", "reciprocal", "sgn", "sign", "sqrt", "sub", "where"),
    }
)
# Copies and views, of all types.
_MOVES = frozenset(
    {
        *(
            "_local_scalar_dense",
            "_to_copy",
            "alias",
            "clone",
            "copy",
            "detach",
            "empty_like",
            "equal",
            "expand",
        ),
        *(
            "fill",
            "full_like",
            "is_same_size",
            "new_empty",
            "new_full",
            "new_ones",
            "new_zeros",
            "ones_like",
        ),
        *(
            "permute",
            "select",
            "slice",
            "split",
            "squeeze",
            "t",
            "transpose",
            "unbind",
            "unsqueeze",
            "view",
        ),
        *("zero", "zeros_like"),
    }
)
_ROUNDED = (torch.float32, torch.float64)
_data: Any = torch.Tensor.data


def compute_whole(*, is_exact: bool) -> None:
    """Compute operations on DTensors of this process with gathered tensors where their parts would not do.

    Args:
        is_exact: bits must not depend on the number of ranks.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._allow_implicit_replication = (
        True  # outside of calls every plain tensor is replicated
    )
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = (
        _whole  # torch uses its default group
    )
    before = dispatcher._propagate_op_sharding_dispatch_slow_path
    if isinstance(before, _Propagation):
        is_exact |= before.is_exact
        before = before.before
    dispatcher._propagate_op_sharding_dispatch_slow_path = _Propagation(
        before, dispatcher._random_ops, is_exact
    )
    debug._clear_sharding_prop_cache()
    divided: Any = DTensor
    divided.data = property(_data.__get__, _assign)
    divided.__format__ = _format


class _Propagation:
    """Place of the function of torch that is asked how an unknown operation treats divided tensors."""

    def __init__(self, before: Callable[..., Any], random: Any, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.before = before
        self._random = random

    def __call__(self, operation: Any, arguments: Any, options: Any, *others: Any) -> Any:
        """Return the result of an operation with gathered tensors, or what torch decides."""
        is_whole = (
            not _has_equal_parts(operation, arguments)
            if self.is_exact
            else operation in self._random
        )
        if not all(isinstance(one, DTensor) for one in _written(operation, arguments, options)):
            return _whole(
                operation, arguments, options
            )  # into a plain tensor, as that of a moving average
        if is_whole and any(map(_is_divided, tree_leaves((arguments, options)))):
            return _whole(operation, arguments, options)
        try:
            return self.before(operation, arguments, options, *others)
        except RuntimeError:  # torch writes into no tensor with fewer rows than ranks, for example
            if not any(isinstance(one, DTensor) for one in _written(operation, arguments, options)):
                raise
            return _whole(operation, arguments, options)


def _has_equal_parts(operation: Any, arguments: Any) -> bool:
    """Whether parts of the result are the results of parts, to the bit."""
    name = operation._schema.name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")
    if name in _MOVES:
        return True
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return name in _ARITHMETIC and all(
        one.dtype in _ROUNDED or not (one.is_floating_point() or one.is_complex())
        for one in tensors
    )


def _assign(parameter: DTensor, value: torch.Tensor) -> None:
    """Assign to `.data`, which torch would forget for a DTensor.

    Raises:
        RunError: the shape or the dtype is another one.
    """
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise RunError(
            f"{value.dtype} of shape {tuple(value.shape)} for `.data` of a divided parameter",
            expected=f"{parameter.dtype} of shape {tuple(parameter.shape)}",
            fix="change the model before samestep.parallel",
            code="E_INCOMPATIBLE",
        )
    with torch.no_grad():
        parameter.copy_(value)


def _format(tensor: DTensor, spec: str) -> str:
    """Return a scalar as text, as of other tensors: torch formats the object."""
    if tensor.dim() == 0:
        return format(tensor.item(), spec)
    return object.__format__(tensor, spec)


def _is_divided(value: Any) -> bool:
    return isinstance(value, DTensor) and not all(
        placement.is_replicate() for placement in value.placements
    )


def _number(operation: Any, arguments: Any, options: Any) -> Any:
    """Return a tensor of one element as a number of Python."""
    return operation(_full(arguments[0]))


def _full(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        full = Division.of(value).full_tensor(value._local_tensor)
        if full.stride() == value.stride():
            return full
        # Products of matrices have other bits for another order of elements in memory.
        return torch.empty_strided(
            full.shape, value.stride(), dtype=full.dtype, device=full.device
        ).copy_(full)


def _whole(operation: Any, arguments: Any, options: Any) -> Any:
    full: dict[int, torch.Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor) and id(value) not in full:
            full[id(value)] = _full(value)
        return full.get(id(value), value)

    result = operation(*tree_map(gathered, arguments), **tree_map(gathered, options))
    written = {}
    for one in _written(operation, arguments, options):
        if isinstance(one, DTensor):
            one._local_tensor.copy_(Division.of(one).local_part(full[id(one)]))
            written[id(full[id(one)])] = one
    return tree_map(lambda value: written.get(id(value), value), result)


def _written(operation: Any, arguments: Any, options: Any) -> Iterator[Any]:
    """Yield the tensors into which an operation writes."""
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = arguments[number] if number < len(arguments) else options.get(argument.name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
