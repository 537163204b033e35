"""Parameters of this rank: complete, or the local parts of parameters that are divided among ranks.

In the model, a divided parameter is a DTensor. Everywhere else (optimizer, gradients, averages, checksums) the local
part is a plain tensor that shares memory with the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samestep.distributed.devices import is_accelerator, value_on_host
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.gradient_norm import partial_squares, sums_on_grids

# Optimizers that update an element from its own gradient and state alone. Optimizers that use the complete tensor
# (Adafactor, LBFGS, Muon) would use a local part instead.
_ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)

_ALIGNMENT = 16  # bytes of CUDA's widest load


@dataclass(frozen=True)
class Division:
    """Division of one tensor among ranks."""

    mesh: DeviceMesh  # ranks of the division
    placements: tuple[Placement, ...]  # of the tensor, one per mesh axis
    shape: torch.Size  # of the full tensor
    stride: tuple[int, ...]  # of the full tensor

    @classmethod
    def of(cls, tensor: DTensor) -> Division:
        """Return the division of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """One process group per axis along which local parts differ."""
        axes = enumerate(self.placements)
        return tuple(self.mesh.get_group(axis) for axis, placement in axes if not placement.is_replicate())

    @cached_property
    def _gathering_mesh(self) -> DeviceMesh:
        """The mesh, or its groups as a mesh of the hosts where they would gather tensors of a GPU by gloo.

        The process would end: https://github.com/pytorch/pytorch/issues/152645.
        """
        mesh, device = self.mesh, torch.device(self.mesh.device_type)
        groups = mesh.get_all_groups()
        if not is_accelerator(device) or groups[0]._get_backend(device).name() != "gloo":
            return mesh
        return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)

    def full_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from the local parts of all ranks. A collective."""
        mesh = self._gathering_mesh
        part = local.to(mesh.device_type)
        full = DTensor.from_local(part, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)
        placements = list(self.placements)
        for axis in range(len(placements)):  # the reverse of the order of division; torch warns of any other
            placements[axis] = Replicate()
            full = full.redistribute(placements=placements)
        return full.to_local().to(self.mesh.device_type)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes along which local parts differ."""
        names = self.mesh.mesh_dim_names or ()
        return tuple(name for name, placed in zip(names, self.placements, strict=True) if not placed.is_replicate())

    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes and offsets of this rank's part."""
        return compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, as a view."""
        sizes, offsets = self.bounds()
        return full[tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))]


class LocalParameters:
    """Parameters of a model on this rank.

    Args:
        model: the model.
        world: ranks, with the device of this rank.
        column_slices: number of slices of the columns on this rank, by name of a parameter whose rows are divided into
            slices. The squares of a row are added per slice, which can be on another rank.

    Attributes:
        local: local part of each parameter, by the model's names.
        names: trained parameters as the optimizer has them, with the model's names.
        module_names: trained parameters as the model has them, with the same names.
        is_divided: some parameter is not complete on this rank.
        divides_tensors: the optimizer updates parts of tensors.
    """

    _own_axes: tuple[str, ...] = ()  # axes along which ranks have different parameters

    def __init__(self, model: torch.nn.Module, world: World, column_slices: Mapping[str, int] | None = None) -> None:
        self._device, self._column_slices = world.device, column_slices or {}
        self._in_module = dict(model.named_parameters())
        self._divisions = {name: Division.of(p) for name, p in self._in_module.items() if isinstance(p, DTensor)}
        groups = chain.from_iterable(division.groups for division in self._divisions.values())
        self._worlds = {group: world.subworld(group) for group in dict.fromkeys(groups)}  # with parts of parameters
        self.local = {name: _local_parameter(parameter) for name, parameter in self._in_module.items()}
        self.names = {self.local[name]: name for name, p in self._in_module.items() if p.requires_grad}
        self.module_names = {p: name for name, p in self._in_module.items() if p.requires_grad}
        self.is_divided = self.divides_tensors = bool(self._divisions)
        self._counted = list(self.names.values())  # parameters that this rank adds to the norm
        self._size = sum(parameter.numel() for parameter in self._in_module.values())

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Local parts of the trained parameters, by name."""
        return {name: parameter for name, parameter in self.local.items() if parameter.requires_grad}

    def take_gradients(self) -> None:
        """Move gradients from the model's parameters to the local parts."""
        for name, division in self._divisions.items():
            parameter = self._in_module[name]
            if isinstance(gradient := parameter.grad, DTensor):
                if gradient.placements == division.placements:
                    with torch.no_grad():  # without a function of autograd
                        self.local[name].grad = gradient.to_local()
                else:
                    self.local[name].grad = gradient.redistribute(placements=division.placements).to_local()
                parameter.grad = None

    def drop_gradients(self) -> None:
        """Drop the gradients of the model's parameters."""
        for name in self._divisions:
            self._in_module[name].grad = None

    def align_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy gradients at odd addresses, such as views of a bucket, to memory of their own.

        CUDA's kernels, and products of matrices on CPUs, can add in another order if an address is no multiple of 16
        bytes: an optimizer that reduces over a gradient would depend on the layout of buckets. On CPUs, an elementwise
        optimizer does not.
        """
        if not is_accelerator(self._device) and is_elementwise(optimizer):
            return
        for parameter in self.names:
            if (gradient := parameter.grad) is not None and gradient.data_ptr() % _ALIGNMENT:
                parameter.grad = gradient.clone()

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by a float64 scalar on a device, without a wait for it."""
        if value_on_host(factor) == 1.0:
            return  # the products have the same bits, and would read and write all gradients
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self.names:
            if (gradient := parameter.grad) is not None:
                groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in groups.items():
            if dtype.itemsize >= 4:
                torch._foreach_mul_(gradients, factor.to(device, dtype))
            else:  # a factor of 16 bits would be too inaccurate
                for gradient in gradients:
                    gradient.copy_(gradient.float().mul_(factor.to(device, torch.float32)))

    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a parameter, or of state with the same shape, on every rank. A collective.

        A tensor with another number of dimensions, such as a step count, is returned unchanged.
        """
        division = self._divisions.get(name)
        if division is None or local.dim() != len(division.shape):
            return local
        return division.full_tensor(local)

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor; a tensor of another shape than the parameter is unchanged."""
        division = self._divisions.get(name)
        if division is None or full.shape != division.shape:
            return full
        return division.local_part(full)

    def position(self, name: str, local: torch.Tensor, world: World) -> tuple[torch.Size, tuple[int, ...]] | None:
        """Return the shape of the full tensor of a parameter or of its state, and the offsets of this rank's part.

        None if the part counts on another rank. A tensor with another number of dimensions is complete on each rank.
        """
        division = self._divisions.get(name)
        is_divided = division is not None and local.dim() == len(division.shape)
        axes = division.axes if division is not None and is_divided else ()
        if any(coordinate for axis, coordinate in world.coordinates.items() if axis not in (*axes, *self._own_axes)):
            return None
        if division is None or not is_divided:
            return local.shape, (0,) * local.dim()
        return division.shape, division.bounds()[1]

    def merge_metadata(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Return per-parameter values of all ranks; every rank has values of every parameter already."""
        return values

    @cached_property
    def _counted_by_groups(self) -> dict[tuple[dist.ProcessGroup, ...], list[str]]:
        """Names of the parameters of the norm by the groups among whose ranks they are divided."""
        names: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
        for name in self._counted:
            groups = self._divisions[name].groups if name in self._divisions else ()
            names.setdefault(groups, []).append(name)
        return names or {(): []}

    def total_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients as a float64 scalar; the bits do not depend on the division of rows.

        A collective if parameters are divided. No wait for the device.
        """
        squares = {groups: self._partial_squares(names) for groups, names in self._counted_by_groups.items()}
        largest = reduce(torch.maximum, [values.amax() for values in squares.values()])
        for world in self._worlds.values():
            world.combine(largest, "max")
        self._combine_stages(largest, "max")
        totals = []
        for groups, values in squares.items():
            totals.append(sums_on_grids(values, largest, self._size))
            for group in groups:
                self._worlds[group].combine(totals[-1])
        total = reduce(torch.add, totals)
        self._combine_stages(total, "sum")
        return total.sum().sqrt()

    def _partial_squares(self, names: Iterable[str]) -> torch.Tensor:
        gradients: list[torch.Tensor] = []
        for name in names:
            if (gradient := self.local[name].grad) is not None:
                slices = self._column_slices.get(name, 1)
                gradients += gradient.chunk(slices, 1) if slices > 1 else [gradient]
        return partial_squares(gradients, self._device)

    def _combine_stages(self, values: torch.Tensor, operation: Literal["sum", "max"]) -> None:
        """Combine values of the stages of a pipeline, in place."""

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, world: World) -> None:
        """Share the scaler's overflow flag among ranks: an overflow in one part skips the step on every rank."""
        if self.is_divided and scaler.is_enabled():
            flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not flags:  # no parameter of this rank is trained
                flags[self._device] = torch.zeros((), device=self._device)
            for flag in flags.values():
                world.all_reduce(flag)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates an element from its own gradient and state alone."""
    return type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def replace_optimizer_parameters(
    optimizer: torch.optim.Optimizer, before: Iterable[torch.nn.Parameter], local_parameters: LocalParameters
) -> None:
    """Replace the optimizer's parameters, those of the model `before` the division in the model's order.

    Raises:
        InputError: the optimizer is not elementwise, or has state already.
    """
    if not local_parameters.is_divided:
        return
    if local_parameters.divides_tensors and not is_elementwise(optimizer):
        raise InputError(
            f"the optimizer {type(optimizer).__name__} with parameters that are divided among ranks",
            expected=f"an elementwise optimizer of torch.optim: {', '.join(sorted(_ELEMENTWISE))}",
            fix="use one of these, or a strategy that keeps parameters complete: ddp",
            code="E_OPTIMIZER",
        )
    if optimizer.state:
        raise InputError(
            "the optimizer has state before the engine is created",
            expected="if parameters are divided, optimizer state is created by the engine or loaded from a checkpoint",
            fix="create the engine before the first optimizer step",
            code="E_OPTIMIZER",
        )
    now = dict(zip(before, local_parameters.local.values(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now.get(parameter, parameter) for parameter in group["params"]]


def _local_parameter(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    tensor = parameter.detach()
    assert isinstance(tensor, DTensor)
    return torch.nn.Parameter(tensor.to_local(), parameter.requires_grad)


def closure_error(optimizer: torch.optim.Optimizer) -> InputError:
    """Return the error of an optimizer that computes the loss several times in a step."""
    return InputError(
        f"{type(optimizer).__name__} needs a closure, which computes the loss again inside the step",
        expected="an optimizer that computes an update from one gradient of the global batch",
        fix="use another optimizer, such as AdamW or Muon; for sharpness-aware training, an average of the weights "
        "(Engine(ema=0.999)) has a similar purpose",
        code="E_OPTIMIZER",
    )
