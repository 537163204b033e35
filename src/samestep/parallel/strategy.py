"""How a model lives on devices, as the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from samestep.config import Reduction as ReductionName
from samestep.parallel import sharded, tensor
from samestep.parallel.ddp import DdpStrategy
from samestep.parallel.pieces import Pieces
from samestep.parallel.pipeline import strategy as pipeline
from samestep.parallel.pipeline.pieces import StagePieces
from samestep.parallel.pipeline.strategy import PipelineStrategy
from samestep.parallel.placed import Placement, place
from samestep.parallel.reduction import build_reduction
from samestep.parallel.same_start import begin_the_same
from samestep.parallel.sharded import ShardedStrategy
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
        sums_late: a shard's gradients are seen by nobody before those of this rank's last one are there.
    """

    name: str
    module: torch.nn.Module
    sums_late: bool

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


def move_to_devices(model: torch.nn.Module, world: World) -> Placement | None:
    """Move a model to the device of this rank, or its parts to those it has; where they are, if there are several.

    Raises:
        InputError: the strategy does not fit the model, or the devices are not there.
    """
    if world.strategy.name == "placed":
        return place(model, world)
    if world.layout.shard == 1:  # else it is moved part by part, when it is divided
        model.to(world.device)
    return None


def divide_model(model: torch.nn.Module, world: World) -> Pieces:
    """Leave of `model` on this rank what its layout has here, in place; the order in which a model is wrapped.

    Returns:
        What that is.

    Raises:
        InputError: the layout does not fit the model.
    """
    if not world.layout.is_split:
        return Pieces(model, world.device)
    if not world.strategy.meta:
        begin_the_same(model, world)
    if world.layout.tensor > 1:
        tensor.divide(model, world)
    if world.layout.shard > 1:
        sharded.divide(model, world)
    return pipeline.divide(model, world) if world.layout.pipeline > 1 else Pieces(model, world.device)


def build_strategy(
    model: torch.nn.Module, pieces: Pieces, reduction: ReductionName, world: World, *, together: bool = False
) -> Strategy:
    """What computes shards in the layout of a world.

    Args:
        pieces: what `divide_model` has left of the model here.
        together: all shards of a rank are computed at the same time, and communicate while they are.
    """
    if isinstance(pieces, StagePieces):
        return PipelineStrategy(model, pieces, world)
    parameters = list(pieces.names)
    sums = build_reduction(reduction, world.data, parameters, world.strategy.hook)
    if world.layout.shard > 1:
        return ShardedStrategy(model, pieces, sums, world)
    if together or world.layout.tensor > 1 or (world.strategy.name == "placed" and world.size > 1):
        return TogetherStrategy(model, pieces, sums, world)
    if world.size == 1:
        return SingleStrategy(model, sums, world.layout.name)
    return DdpStrategy(model, parameters, sums, world)
