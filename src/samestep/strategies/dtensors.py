"""DTensors: their full values and parts, and operations of the script that need full values.

A sum of a divided tensor is, for torch, a part of the sum on each rank: `.item()` would return the
part, and the order of the additions would depend on the number of ranks. Random numbers would be
drawn once more on each rank. After `compute_whole` such operations of penalties, norms and
optimizers compute with gathered tensors, on every rank the same, and their numbers are complete.

Private: the dispatcher of DTensors of torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, debug
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map

from samestep.config.exclusions import excluded
from samestep.distributed.devices import is_accelerator
from samestep.launcher.process_state import process_state
from samestep.view.crossings import crossing, replicated
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


@dataclass(frozen=True)
class Division:
    """Division of one tensor among ranks."""

    mesh: DeviceMesh  # ranks of the division
    placements: tuple[Placement, ...]  # of the tensor, one per mesh axis
    shape: torch.Size  # of the full tensor
    stride: tuple[int, ...]  # of the full tensor

    @classmethod
    def of(cls, tensor: DTensor) -> Division:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def full_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from the local parts of all ranks. A collective."""
        mesh = self.mesh
        device = torch.device(mesh.device_type)
        if is_accelerator(device) and mesh.get_group(0)._get_backend(device).name() == "gloo":
            # Gathering tensors of a GPU by gloo would end the process, so hosts gather:
            # https://github.com/pytorch/pytorch/issues/152645. The mesh is copied, since a new one
            # would need a default group, which a script under the global view does not see.
            mesh = copy(mesh)
            mesh._device_type = "cpu"
            mesh._hash = None
        full = self._from_local(local.to(mesh.device_type), mesh)
        placements = list(self.placements)
        for axis in range(len(placements)):  # torch warns of any other order
            placements[axis] = Replicate()
            full = full.redistribute(placements=placements)
        return full.to_local().to(self.mesh.device_type)

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, as a view."""
        sizes, offsets = compute_local_shape_and_global_offset(
            self.shape, self.mesh, self.placements
        )
        bounds = zip(sizes, offsets, strict=True)
        return full[tuple(slice(offset, offset + size) for size, offset in bounds)]

    def divided(self, full: torch.Tensor, device: torch.device) -> DTensor:
        """Return a full tensor, which every rank has, with its parts on a device; no graph."""
        part = self.local_part(full.detach()).to(device)
        return self.of_part(part.clone(memory_format=torch.contiguous_format))

    def of_part(self, local: torch.Tensor) -> DTensor:
        """Return the tensor with this rank's part; no graph."""
        return self._from_local(local.detach(), self.mesh)

    def _from_local(self, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        # `run_check` would broadcast replicated values, which are equal on all ranks.
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a graph; other tensors as they are."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor  # private; `to_local` would belong to the graph
    return tensor


def full_value(tensor: DTensor) -> torch.Tensor:
    """Return the full value of a DTensor without a graph. A collective."""
    return Division.of(tensor).full_tensor(local_part(tensor).detach())


# --- in a graph ----------------------------------------------------------------------------------


def gathered(
    parameter: torch.Tensor, full: Callable[[Any], torch.Tensor] = full_value
) -> torch.Tensor:
    """Return the full value of a divided parameter; its gradient becomes divided. Differentiable.

    Args:
        parameter: the parameter, or a tensor that is divided like it. Its gradients are equal on
            all ranks.
        full: returns the full value.
    """

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [_divided(replicated(gradient), division, device)]

    division = Division.of(cast(DTensor, parameter))
    device = parameter.device
    return crossing([parameter], lambda value: [full(value)], back)[0]


def local_in_graph(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; its gradient becomes a DTensor. Differentiable."""
    divided: Any = parameter
    part = divided._local_tensor
    spec = divided._spec

    def whole(own: torch.Tensor) -> list[torch.Tensor]:
        # Not `from_local`, which takes longer than all else here.
        return [DTensor(own.detach(), spec, requires_grad=False)]

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        return crossing([gradient], whole, lambda again: [local_in_graph(again)])

    return crossing([parameter], lambda _: [part.detach()], back)[0]


def _divided(full: torch.Tensor, division: Division, device: torch.device) -> torch.Tensor:
    """Return a full tensor divided between the ranks; its gradient becomes full. Differentiable."""

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        # Gradients of operations with the whole parameter are complete.
        if isinstance(gradient, DTensor):
            gradient = gathered(gradient)
        return [gradient]

    return crossing([full], lambda value: [division.divided(value, device)], back)[0]


def as_divided(
    division: Division, device: torch.device, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a gradient divided as its parameter; that of an operation with all of it is not."""
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    return _divided(gradient, division, device)


# --- operations of the script --------------------------------------------------------------------


def compute_whole(*, is_exact: bool) -> None:
    """Compute with gathered tensors, in this process, where the parts of DTensors would not do.

    Args:
        is_exact: bits must not depend on the number of ranks.
    """
    dispatcher: Any = DTensor._op_dispatcher
    # Outside of calls every plain tensor is replicated.
    dispatcher._allow_implicit_replication = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
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
        written = list(_written(operation, arguments, options))
        if not all(isinstance(one, DTensor) for one in written):
            # Into a plain tensor, as that of a moving average.
            return _whole(operation, arguments, options)
        sums = [one for one in written if any(place.is_partial() for place in one.placements)]
        if sums:
            # Of such a sum each rank holds a part: torch refuses most operations that write into
            # it, and `fill_` would write the value once for each part.
            for one in sums:
                _complete_sum(one)
            return operation(*arguments, **options)
        is_whole = operation in self._random
        if self.is_exact:
            # Draws, too: they are in neither list.
            is_whole = not _has_equal_parts(operation, arguments)
        if is_whole and any(map(has_parts, tree_leaves((arguments, options)))):
            return _whole(operation, arguments, options)
        try:
            return self.before(operation, arguments, options, *others)
        except NotImplementedError:  # torch has no rule for the operation
            return _whole(operation, arguments, options)
        except RuntimeError:  # torch writes into no tensor with fewer rows than ranks, for example
            if not written:
                raise
            return _whole(operation, arguments, options)


def _complete_sum(tensor: DTensor) -> None:
    """Add the parts of a sum, or another reduction, in place. A collective."""
    placements = [Replicate() if place.is_partial() else place for place in tensor.placements]
    complete = tensor.redistribute(placements=placements)
    tensor._local_tensor = complete._local_tensor
    tensor._spec = complete._spec


def has_parts(value: Any) -> bool:
    """Whether a value is a DTensor of which ranks have parts, or summands."""
    if not isinstance(value, DTensor):
        return False
    return not all(placement.is_replicate() for placement in value.placements)


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
        raise excluded(
            "another shape of a divided parameter",
            *(value.dtype, tuple(value.shape), parameter.dtype, tuple(parameter.shape)),
        )
    with torch.no_grad():
        parameter.copy_(value)


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


def _number(operation: Any, arguments: Any, options: Any) -> Any:
    """Return a tensor of one element as a number of Python."""
    value = arguments[0]
    if isinstance(value, DTensor):
        value = _full(value)
    return operation(value)


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

    def complete(value: Any) -> Any:
        if isinstance(value, DTensor) and id(value) not in full:
            full[id(value)] = _full(value)
        return full.get(id(value), value)

    result = operation(*tree_map(complete, arguments), **tree_map(complete, options))
    written = {}
    for one in _written(operation, arguments, options):
        if isinstance(one, DTensor):
            one._local_tensor.copy_(Division.of(one).local_part(full[id(one)]))
            # An operation in place returns a tensor of the script, not the gathered one.
            written[id(full[id(one)])] = one
    return tree_map(lambda value: written.get(id(value), value), result)


def _written(operation: Any, arguments: Any, options: Any) -> Iterator[Any]:
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = options.get(argument.name)
        if number < len(arguments):
            value = arguments[number]
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
