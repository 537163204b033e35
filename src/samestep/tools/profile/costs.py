"""What a batch and the sum of gradients cost on these ranks: tried, not looked up."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median

import torch

from samestep.config import Reduction
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.engine.step import Engine
from samestep.parallel.exchange import plain_sum, tree_sum
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World
from samestep.tools.profile.measured import Costs

# torch's own size of a bucket, and that of the first one, which is small so that it goes early.
_BUCKET_BYTES, _FIRST_BYTES = 25 * 2**20, 2**20
_TRIES = 5  # of which the median counts


def costs(engine: Engine, train: Loader, batch: GlobalBatch, world: World) -> Costs:
    """Try them; all ranks call it together.

    Args:
        batch: one of those that `train` has made.
    """
    world.barrier()
    making = min(_seconds(lambda: train.make_again(batch)) for _ in range(2))
    total = sum(p.numel() * p.element_size() for p in engine.model.parameters() if p.requires_grad)
    buckets = bucket_count(total)
    seconds = 0.0
    if world.data.size > 1 and not world.layout.is_split:
        world.barrier()
        seconds = _sum_seconds(world.data, batch.shards, engine.rules.reduction, total, buckets)
    return Costs(making, seconds, buckets, total)


def bucket_count(total: int) -> int:
    """In how many messages torch's own buckets send so many bytes."""
    return 1 if total <= _FIRST_BYTES else 1 + ceil((total - _FIRST_BYTES) / _BUCKET_BYTES)


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _sum_seconds(world: World, shards: int, reduction: Reduction, total: int, buckets: int) -> float:
    tree = ShardTree(shards, shards)
    numbers = max(1, total // 4 // buckets)
    mine = [torch.zeros(numbers, device=world.device) for _ in tree.cover(world.rank, world.size)]

    def run() -> None:
        for _ in range(buckets):
            if reduction == "exact":
                tree_sum(world, tree, mine, mine[0])
            else:
                plain_sum(world, mine[0])
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    return median(_seconds(run) for _ in range(_TRIES))
