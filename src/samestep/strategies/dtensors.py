"""DTensors: their full values and parts, in graphs and outside of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samestep.distributed.devices import is_accelerator
from samestep.view.crossings import crossing, replicated


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


def has_parts(value: Any) -> bool:
    """Whether a value is a DTensor of which ranks have parts, or summands."""
    if not isinstance(value, DTensor):
        return False
    return not all(placement.is_replicate() for placement in value.placements)


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
