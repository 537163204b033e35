"""How ranks divide a tensor among them, and the ways between a part and the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Division:
    """How ranks divide a tensor among them.

    Attributes:
        placements: what becomes of the tensor along each axis of the mesh.
        shape: of the whole tensor.
        stride: of the whole tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those within which parts differ, an axis each."""
        axes = enumerate(self.placements)
        return tuple(self.mesh.get_group(axis) for axis, placement in axes if not placement.is_replicate())

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The tensor from the parts of all ranks; all of them call it."""
        found = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        placements = list(self.placements)
        for axis in range(len(placements)):  # in the order that undoes how they were made; torch warns of any other
            placements[axis] = Replicate()
            found = found.redistribute(placements=placements)
        return found.to_local()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, as a view of it."""
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return whole[tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))]


def division_of(tensor: DTensor) -> Division:
    """How a tensor is divided."""
    return Division(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
