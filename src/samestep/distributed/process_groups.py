"""Process groups of a world: all ranks, mesh axes, ranks with different data."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, debug

from samestep.config import StrategyConfig, resolve_mesh
from samestep.config.strategy import AXES
from samestep.distributed.world import DataShares, RunContext, World


def build_world(
    rank: int, size: int, device: torch.device, context: RunContext, strategy: StrategyConfig, timeout: timedelta
) -> World:
    """Create the process groups and the mesh of a strategy. Collective: every rank calls it.

    Plain replication needs no group but the default one.

    Raises:
        InputError: the strategy has no mesh for this number of ranks.
    """
    shape = resolve_mesh(strategy, size)
    assert strategy.shares != "auto", "the trainer moves shares, and begins with equal ones"
    shares = DataShares(strategy.shares if strategy.shares and size > 1 else None)
    if not shape.splits_model:
        return World(rank, size, device, context, strategy=strategy, timeout=timeout, data_shares=shares)
    # torch takes meshes with equal ranks and names for equal: its caches of an earlier world in this process would call
    # groups that no longer exist, or other groups of the same names.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    ranks = torch.arange(shape.size).view(shape.sizes)
    # Groups of our own: the groups that torch creates for a mesh have a timeout of 30 minutes.
    axes = [
        _create_groups(rank, ranks.movedim(axis, -1).reshape(-1, length), timeout)
        for axis, length in enumerate(shape.sizes)
    ]
    mesh = DeviceMesh.from_group(axes, device.type, ranks, mesh_dim_names=AXES)
    data_world = None
    if shape.data_size < size:
        dims = [AXES.index("replicate"), AXES.index("shard")]
        group = _create_groups(rank, ranks.movedim(dims, [-2, -1]).reshape(-1, shape.data_size), timeout)
        rank_of_data, data_size = dist.get_rank(group), dist.get_world_size(group)
        data_world = World(rank_of_data, data_size, device, context, group, timeout=timeout, data_shares=shares)
    world = World(rank, size, device, context, strategy=strategy, mesh=mesh, timeout=timeout, data_world=data_world)
    return world if data_world is not None else replace(world, data_shares=shares)


def _create_groups(rank: int, rows: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Create one group per row of ranks, on every rank in the same order, and return the group of `rank`."""
    if len(rows) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(row, timeout=timeout) for row in rows.tolist()]
    own: dist.ProcessGroup = next(g for g, row in zip(groups, rows.tolist(), strict=True) if rank in row)
    return own
