"""Gradients that meet when all shards of a rank are done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from samestep.parallel.kept import sum_kept
from samestep.parallel.lane import done
from samestep.parallel.pieces import Pieces
from samestep.parallel.reduction import Reduction
from samestep.parallel.same_start import begin_the_same
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World


class TogetherStrategy:
    """Copies of the model, or of what a rank has of it; gradients meet after backward of all shards.

    For models whose forward and backward communicate by themselves. Two threads that communicate would have to do so in
    one order on all ranks, and the backend does not notice when they do not; so all communication is in the caller's
    thread, and DDP, which starts its own during backward, is not in it.
    """

    sums_late = False

    def __init__(self, model: torch.nn.Module, pieces: Pieces, reduction: Reduction, world: World) -> None:
        self.name = world.layout.name
        self.module = model
        self._pieces, self._reduction = pieces, reduction
        if not pieces.is_divided:
            begin_the_same(model, world)

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        yield
        self._pieces.take_gradients()
        self._reduction.keep(tree, shard)

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        return done(self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._pieces.drop_gradients()
        self._reduction.forget()

    def finish(self, tree: ShardTree) -> None:
        sum_kept(self._pieces.names, lambda group: self._reduction.kept(tree, group))
        self._reduction.forget()
