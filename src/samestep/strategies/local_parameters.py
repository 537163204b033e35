"""Parameters of this rank: complete, or the local parts of parameters that are divided among ranks.

In the model, a divided parameter is a DTensor. Everywhere else (optimizer, gradients, averages, checksums) the local
part is a plain tensor that shares memory with the DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World


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

    Attributes:
        local: local part of each parameter, by the model's names.
        is_divided: some parameter is not complete on this rank.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self._divisions = {name: Division.of(p) for name, p in parameters.items() if isinstance(p, DTensor)}
        self.local = {name: _local_parameter(parameter) for name, parameter in parameters.items()}
        self.is_divided = bool(self._divisions)

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
        if any(coordinate for axis, coordinate in world.coordinates.items() if axis not in axes):
            return None
        if division is None or not is_divided:
            return local.shape, (0,) * local.dim()
        return division.shape, division.bounds()[1]

    def merge_metadata(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Return per-parameter values of all ranks; every rank has values of every parameter already."""
        return values


def _local_parameter(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    tensor = parameter.detach()
    assert isinstance(tensor, DTensor)
    return torch.nn.Parameter(tensor.to_local(), parameter.requires_grad)
