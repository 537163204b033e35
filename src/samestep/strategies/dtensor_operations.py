"""Operations of the script with DTensors, outside of calls: which compute with gathered tensors.

A sum of a divided tensor is, for torch, a part of the sum on each rank: `.item()` would return the
part, and the order of the additions would depend on the number of ranks. Random numbers would be
drawn once more on each rank. A write into a row would change a copy of the row. After
`compute_whole` such operations of penalties, norms and optimizers compute with gathered tensors, on
every rank the same, and their numbers are complete.

Private: the dispatcher of DTensors of torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, debug
from torch.utils._pytree import tree_map

from samestep.config.exclusions import excluded
from samestep.launcher.process_state import process_state
from samestep.strategies.dtensors import Division, full_value, has_parts, local_part
from samestep.view.rank_comparison import SAVE, SAVE_FIX

# Element by element, with the same rounding in vectors and outside of them; of float32 and float64
# only.
_ARITHMETIC_NAMES = (
    "abs add addcdiv addcmul clamp clamp_max clamp_min div eq ge gt isfinite isnan le lerp "
    "logical_and logical_not lt maximum minimum mul ne neg reciprocal sgn sign sqrt sub where"
)
_ARITHMETIC = frozenset(_ARITHMETIC_NAMES.split())
# Copies and views, of all types.
_MOVE_NAMES = (
    "_local_scalar_dense _to_copy alias clone copy detach empty_like equal expand fill full_like "
    "is_same_size new_empty new_full new_ones new_zeros ones_like permute select slice split "
    "squeeze t transpose unbind unsqueeze view zero zeros_like"
)
_MOVES = frozenset(_MOVE_NAMES.split())
_ROUNDED = (torch.float32, torch.float64)
_data: Any = torch.Tensor.data


def compute_whole(*, is_exact: bool) -> None:
    """Compute with gathered tensors, in this process, where the parts of DTensors would not do.

    Args:
        is_exact: bits must not depend on the number of ranks.
    """
    dispatcher: Any = DTensor._op_dispatcher
    # Outside of calls every plain tensor is replicated.
    dispatcher._allow_implicit_replication = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _whole
    # Torch would use its default group for this one.
    dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = _whole
    before = dispatcher._propagate_op_sharding_dispatch_slow_path
    # Of an earlier module: one such place serves the process.
    if isinstance(before, _Propagation):
        is_exact |= before.is_exact
        before = before.before
    dispatcher._propagate_op_sharding_dispatch_slow_path = _Propagation(
        before, dispatcher._random_ops, is_exact
    )
    debug._clear_sharding_prop_cache()  # decisions of before
    divided: Any = DTensor
    divided.data = property(_data.__get__, _assign)
    divided.__format__ = _format
    divided.__reduce_ex__ = _pickled


class _Propagation:
    """Place of torch's function that decides how an unknown operation treats divided tensors."""

    def __init__(self, before: Callable[..., Any], random: Any, is_exact: bool) -> None:
        self.is_exact = is_exact
        self.before = before
        self._random = random

    def __call__(self, operation: Any, arguments: Any, options: Any, *others: Any) -> Any:
        if torch.Tag.inplace_view in operation.tags:
            raise excluded("another shape of a divided tensor", operation._schema.name)
        written = list(_written(operation, arguments, options))
        are_divided = any(map(has_parts, _tensors((*arguments, *options.values()))))
        sums = [one for one in written if _is_sum(one)]
        if sums:
            # Of such a sum each rank holds a part: torch refuses most operations that write into
            # it, and `fill_` would write the value once for each part.
            for one in sums:
                _complete_sum(one)
            return operation(*arguments, **options)
        if self._is_whole(operation, arguments, written, are_divided=are_divided):
            return _whole(operation, arguments, options)
        if written and not are_divided and operation._schema.name.endswith("_"):
            # Each time: torch would keep the decision, for views too that are copies.
            return _on_parts(operation, arguments, options, written)
        try:
            return self.before(operation, arguments, options, *others)
        except RuntimeError:
            # Torch has no rule, as for many operations with the gradient of a penalty; or writes
            # into no tensor with fewer rows than ranks; or refuses a view along rows. An error of
            # the operation itself is raised again.
            return _whole(operation, arguments, options)

    def _is_whole(
        self, operation: Any, arguments: Any, written: Sequence[Any], *, are_divided: bool
    ) -> bool:
        # Into a plain tensor, as that of a moving average; or into a copy in place of a view.
        if any(not isinstance(one, DTensor) or _lost_base(one) is not None for one in written):
            return True
        if not are_divided:
            return False
        if self.is_exact:
            # Draws, too: they are in neither list.
            return not _has_equal_parts(operation, arguments)
        # Torch would write the result nowhere if it were divided in another way.
        return operation in self._random or (bool(written) and not _is_by_element(operation))


def _is_sum(tensor: Any) -> bool:
    is_divided = isinstance(tensor, DTensor)
    return is_divided and any(placement.is_partial() for placement in tensor.placements)


def _complete_sum(tensor: DTensor) -> None:
    """Add the parts of a sum, or another reduction, in place. A collective."""
    placements = [Replicate() if place.is_partial() else place for place in tensor.placements]
    complete = tensor.redistribute(placements=placements)
    tensor._local_tensor = complete._local_tensor
    tensor._spec = complete._spec


def _lost_base(view: DTensor) -> DTensor | None:
    """Return the tensor of which torch has made a copy in place of a view; None for a true view.

    A row of a tensor that is divided by rows is a copy on every rank, for example.
    """
    base = view._base
    if not isinstance(base, DTensor):
        return None
    if _parted_axes(view) < _parted_axes(base):
        return base
    return None


def _parted_axes(tensor: DTensor) -> int:
    return sum(not placement.is_replicate() for placement in tensor.placements)


def _is_by_element(operation: Any) -> bool:
    """Whether an operation in place needs, for an element, those at the same place alone."""
    name = operation._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")) or name.removesuffix("_") in _MOVES:
        return True
    return torch.Tag.pointwise in operation.tags


def _returns_view(operation: Any) -> bool:
    returned = [one.alias_info for one in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _has_equal_parts(operation: Any, arguments: Any) -> bool:
    """Whether parts of the result are the results of parts, to the bit."""
    name = operation._schema.name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")
    if name in _MOVES:
        return True
    tensors = list(_tensors(arguments))
    return name in _ARITHMETIC and all(
        one.dtype in _ROUNDED or not (one.is_floating_point() or one.is_complex())
        for one in tensors
    )


def _assign(parameter: DTensor, value: torch.Tensor) -> None:
    """Assign to `.data`, which torch would forget for a DTensor.

    As in a plain loop, the parameter has the memory of the value afterwards, if the value is a
    DTensor: scripts keep `.data` from before, and assign it again.

    Raises:
        RunError: the shape or the dtype is another one.
    """
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise excluded(
            "another shape of a divided parameter",
            *(value.dtype, tuple(value.shape), parameter.dtype, tuple(parameter.shape)),
        )
    own: Any = parameter
    with torch.no_grad():
        divided = value
        if not isinstance(value, DTensor):
            divided = Division.of(parameter).divided(value, parameter.device)
        elif value.placements != parameter.placements:
            divided = value.redistribute(placements=parameter.placements)
        own._local_tensor = local_part(divided.detach())


def _format(tensor: DTensor, spec: str) -> str:
    """Return a scalar as text, as of other tensors: torch formats the object."""
    if tensor.dim() == 0:
        return format(tensor.item(), spec)
    return object.__format__(tensor, spec)


def _pickled(tensor: DTensor, protocol: Any) -> Any:
    """Pickle the full tensor, as a plain loop does: a file needs all parts. A collective.

    Raises:
        RankMismatchError: another rank does something else.
        RunError: ranks cannot communicate here, as in a thread.
    """
    view = process_state.view
    if view is None or not view.exchanges_here():
        raise excluded("a saved parameter that ranks cannot gather", SAVE_FIX)
    view.any_rank(place=SAVE)
    full = full_value(tensor)
    if isinstance(tensor, nn.Parameter):
        full = nn.Parameter(full, tensor.requires_grad)
    return full.__reduce_ex__(protocol)


@torch.no_grad()
def _full(value: DTensor) -> torch.Tensor:
    full = full_value(value)
    if full.stride() == value.stride():
        return full
    # Products of matrices have other bits for another order of elements in memory.
    ordered = torch.empty_strided(full.shape, value.stride(), dtype=full.dtype, device=full.device)
    return ordered.copy_(full)


def _whole(operation: Any, arguments: Any, options: Any) -> Any:
    """Return the result of an operation with gathered tensors, and divide those it writes into."""
    full: dict[int, torch.Tensor] = {}
    bases: dict[int, tuple[DTensor, torch.Tensor]] = {}
    written = {id(one): one for one in _written(operation, arguments, options)}

    def complete(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if id(value) not in full:
            base = _lost_base(value) if id(value) in written else None
            if base is None:
                full[id(value)] = _full(value)
            else:
                if id(base) not in bases:
                    bases[id(base)] = (base, _full(base))
                # Private: the same view of the gathered tensor.
                view: Any = value
                full[id(value)] = view._view_func_unsafe(bases[id(base)][1])
        return full[id(value)]

    result = operation(*tree_map(complete, arguments), **tree_map(complete, options))
    returned: dict[int, torch.Tensor] = {}
    for one in written.values():
        if isinstance(one, DTensor):
            one._local_tensor.copy_(Division.of(one).local_part(full[id(one)]))
            # An operation in place returns a tensor of the script, not the gathered one.
            returned[id(full[id(one)])] = one
    for base, whole in bases.values():
        base._local_tensor.copy_(Division.of(base).local_part(whole))

    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _returns_view(operation):
            # A DTensor, so that writes into it reach the tensor of which it is a view.
            return DTensor.from_local(value, arguments[0].device_mesh, run_check=False)
        return returned.get(id(value), value)

    return tree_map(shown, result)


def _on_parts(operation: Any, arguments: Any, options: Any, written: Sequence[DTensor]) -> Any:
    """Compute an operation in place with the tensors of this rank."""
    own = [_own(value) for value in arguments]
    result = operation(*own, **{name: _own(value) for name, value in options.items()})
    return None if result is None else written[0]


def _own(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_own(item) for item in value]
    return local_part(value)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    # Not by `torch.utils._pytree`, which takes longer than many operations.
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(operation: Any, arguments: Any, options: Any) -> Iterator[Any]:
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = options.get(argument.name)
        if number < len(arguments):
            value = arguments[number]
        yield from _tensors([value])
