"""Division of one tensor among ranks: its full value, and the local part of a full value."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samestep.distributed.devices import is_accelerator


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
    def _gathering_mesh(self) -> DeviceMesh:
        """The mesh, or its groups as a mesh of the hosts where they would gather tensors of a GPU by gloo.

        The process would end: https://github.com/pytorch/pytorch/issues/152645.
        """
        mesh = self.mesh
        device = torch.device(self.mesh.device_type)
        groups = mesh.get_all_groups()
        if not is_accelerator(device) or groups[0]._get_backend(device).name() != "gloo":
            return mesh
        # A new mesh would need a default group, which a script under the global view does not see.
        hosts = copy(mesh)
        hosts._device_type = "cpu"
        hosts._hash = None
        return hosts

    def full_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor from the local parts of all ranks. A collective."""
        mesh = self._gathering_mesh
        part = local.to(mesh.device_type)
        full = DTensor.from_local(
            part, mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        placements = list(self.placements)
        for axis in range(
            len(placements)
        ):  # the reverse of the order of division; torch warns of any other
            placements[axis] = Replicate()
            full = full.redistribute(placements=placements)
        return full.to_local().to(self.mesh.device_type)

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, as a view."""
        sizes, offsets = compute_local_shape_and_global_offset(
            self.shape, self.mesh, self.placements
        )
        return full[
            tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
        ]

    def divided(self, full: torch.Tensor, device: torch.device) -> DTensor:
        """Return a full tensor, which every rank has, with its parts on a device; without a graph."""
        part = self.local_part(full.detach()).to(device)
        local = part.clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
