"""Stages of a model on different ranks, and copies of all that: `pp`, and `ddp x pp`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from samestep.parallel.flat import flattened, taken_apart
from samestep.parallel.kept import sum_kept
from samestep.parallel.lane import done
from samestep.parallel.pipeline.cut import cut
from samestep.parallel.pipeline.line import Line
from samestep.parallel.pipeline.order import stage_count
from samestep.parallel.pipeline.pieces import StagePieces
from samestep.parallel.reduction import build_reduction
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World


def divide(model: nn.Module, world: World) -> StagePieces:
    """Leave of `model` on this rank the stages it has here, in place.

    Raises:
        InputError: the model cannot be cut so.
    """
    assert world.mesh is not None
    part, ranks = world.strategy, world.part(world.mesh.get_group("pipeline"))
    stages = cut(model, part.stages, stage_count(part, ranks.size))
    return StagePieces(model, Line(model, stages, ranks, part, watches=world.layout.tensor > 1))


class PipelineStrategy:
    """Micro-batches go through the stages; then ranks that have the same stage of a copy sum its gradients.

    Gradients of micro-batches are added up as backward comes to them, so sums are those of one process to rounding.

    Attributes:
        line: the stages.
    """

    sums_late = True

    def __init__(self, model: nn.Module, pieces: StagePieces, world: World) -> None:
        self.name = world.layout.name
        self.module: nn.Module = model
        self.line, self._pieces = pieces.line, pieces
        self._reduction = build_reduction("fast", world.data, list(pieces.names), world.strategy.hook)
        self._groups = {ranks: self._group(ranks) for ranks in sorted(pieces.shared) if self.line.world.rank in ranks}

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        """All of a rank's shards go through the stages in one block, that of the last."""
        yield
        self._reduction.keep(tree, shard)

    def take_gradients(self) -> None:
        """Move the gradients of all micro-batches to what the optimizer holds."""
        self._pieces.take_gradients()

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        if vectors:
            # Losses are on the last stage's rank, buffers on that of their stage: one summand is not zero.
            rows = torch.stack(list(vectors.values()))
            self.line.world.all_reduce(rows)
            vectors = dict(zip(vectors, rows, strict=True))
        return done(self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._pieces.drop_gradients()
        self._reduction.forget()

    def finish(self, tree: ShardTree) -> None:
        sum_kept(self._pieces.names, lambda group: self._reduction.kept(tree, group))
        self._reduction.forget()
        for ranks, group in self._groups.items():
            self._sum_tied([self._pieces.held[name] for name in self._pieces.shared[ranks]], group)

    def _sum_tied(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        flat = flattened([parameter.grad for parameter in parameters if parameter.grad is not None], parameters)
        self.line.world.guarded(lambda: dist.all_reduce(flat, group=group), "a sum of tied gradients")
        for parameter, gradient in zip(parameters, taken_apart(flat, parameters), strict=True):
            parameter.grad = gradient

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Those ranks of this pipeline that have the same parameters."""
        whole = self.line.world.group
        assert whole is not None
        if len(ranks) == self.line.world.size:
            return whole
        numbers = [dist.get_global_rank(whole, rank) for rank in ranks]
        found = dist.new_group(numbers, timeout=self.line.world.timeout, use_local_synchronization=True)
        assert isinstance(found, dist.ProcessGroup)
        return found
