"""One rank that owns every shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from samestep.parallel.lane import done
from samestep.parallel.reduction import Reduction
from samestep.parallel.tree import ShardTree


class SingleStrategy:
    """The model as it is; the sum over shards stays in this process."""

    sums_late = False

    def __init__(self, model: torch.nn.Module, reduction: Reduction, name: str = "single") -> None:
        self.name, self.module = name, model
        self._reduction = reduction

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        yield
        if last:
            self._reduction.local(tree, shard)
        else:
            self._reduction.keep(tree, shard)

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        return done(self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._reduction.forget()

    def finish(self, tree: ShardTree) -> None:
        self._reduction.forget()
