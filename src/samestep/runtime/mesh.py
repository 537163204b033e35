"""The mesh of ranks as torch has it, and the groups that follow from it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, debug

from samestep.config import StrategyPart, settle
from samestep.config.layout import AXES
from samestep.runtime.world import World


def lay_out(world: World, strategy: StrategyPart, timeout: timedelta) -> None:
    """Give a world the layout of a strategy; every rank calls it at the same time.

    Where ranks are copies of each other and nothing else, there is nothing to make.

    Args:
        timeout: how long a collective waits for the other ranks.

    Raises:
        InputError: the strategy has none on so many ranks.
    """
    layout = settle(strategy, world.size)
    world.strategy, world.layout, world.timeout = strategy, layout, timeout
    if not layout.is_split:
        return
    _forget_earlier()
    ranks = torch.arange(layout.size).view(layout.sizes)
    # Made here and not by torch, whose meshes let every message wait for half an hour.
    axes = [_group_of(world, ranks.movedim(axis, -1).reshape(-1, size)) for axis, size in enumerate(layout.sizes)]
    world.mesh = DeviceMesh.from_group(axes, world.device.type, ranks, mesh_dim_names=AXES)
    if layout.data < world.size:
        data = [AXES.index("replicate"), AXES.index("shard")]
        world.data = world.part(_group_of(world, ranks.movedim(data, [-2, -1]).reshape(-1, layout.data)))


def _forget_earlier() -> None:
    """Let torch forget what it knows of meshes of an earlier world of this process.

    It takes a mesh of the same ranks and names for the same one, and would call groups that are gone, or others that
    have their names now.
    """
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _group_of(world: World, parts: torch.Tensor) -> dist.ProcessGroup:
    """The group of this rank when ranks are parted so, a row each; all of them make all groups, in one order."""
    if len(parts) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(row, timeout=world.timeout) for row in parts.tolist()]
    mine: dist.ProcessGroup = next(g for g, row in zip(groups, parts.tolist(), strict=True) if world.rank in row)
    return mine
