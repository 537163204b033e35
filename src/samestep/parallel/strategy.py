"""How a model lives on devices, as the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from samestep.config import Reduction as ReductionName
from samestep.parallel.ddp import DdpStrategy
from samestep.parallel.reduction import build_reduction
from samestep.parallel.single import SingleStrategy
from samestep.parallel.together import TogetherStrategy
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World


class Strategy(Protocol):
    """One way to compute the shards of a global batch and to sum their gradients.

    A step is: `with shard(...)` around forward and backward of each shard this rank owns, in ascending order,
    then `finish`. `tests/conformance/test_strategies.py` holds every implementation to this.

    Attributes:
        name: what the recipe and the documents call it.
        module: what a training forward calls.
    """

    name: str
    module: torch.nn.Module

    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> AbstractContextManager[None]:
        """Forward and backward of one shard; `last` is the last one that this rank has in this batch."""

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to sum one float64 vector of `length` a shard over all shards and ranks.

        Every rank calls it once a step: between forward and backward of its last shard, or before `finish` if it
        has none.
        """

    def abandon(self) -> None:
        """Forget what this step has summed so far: it failed, and whoever goes on begins another."""

    def finish(self, tree: ShardTree) -> None:
        """Afterwards `.grad` of each trained parameter is the sum over all shards, on every rank.

        Raises:
            PeerLostError: another rank went away during the step.
        """


def build_strategy(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    reduction: ReductionName,
    world: World,
    *,
    together: bool = False,
) -> Strategy:
    """The strategy for a world: `single` for one rank, else `ddp`.

    Args:
        together: all shards of a rank are computed at the same time, and communicate while they are.
    """
    sums = build_reduction(reduction, world, parameters)
    if together:
        return TogetherStrategy(model, parameters, sums, world)
    if world.size == 1:
        return SingleStrategy(model, sums)
    return DdpStrategy(model, parameters, sums, world)
