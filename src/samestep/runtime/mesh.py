"""The mesh of ranks as torch has it, and the groups that follow from it."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from samestep.config import StrategyPart, settle
from samestep.config.layout import AXES
from samestep.runtime.world import World


def lay_out(world: World, strategy: StrategyPart) -> None:
    """Give a world the layout of a strategy; every rank calls it at the same time.

    Where ranks are copies of each other and nothing else, there is nothing to make.

    Raises:
        InputError: the strategy has none on so many ranks.
    """
    layout = settle(strategy, world.size)
    world.strategy, world.layout = strategy, layout
    if not layout.is_split:
        return
    mesh = init_device_mesh(world.device.type, layout.sizes, mesh_dim_names=AXES)
    world.mesh = mesh
    if layout.data < world.size:
        data = mesh["replicate", "shard"]._flatten("data") if layout.shard > 1 else mesh["replicate"]
        world.data = world.part(data.get_group())
