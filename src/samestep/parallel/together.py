"""Shards that are computed at the same time: nothing is summed before all of this rank's are done."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist

from samestep.errors import InputError
from samestep.parallel.gather import gather_numbers
from samestep.parallel.kept import sum_kept
from samestep.parallel.lane import done
from samestep.parallel.reduction import Reduction
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World


class TogetherStrategy:
    """A replica of the model a rank, as with `ddp`, and by the same name; gradients meet after backward of all shards.

    While shards are computed, forward and backward communicate by themselves. Two threads that communicate would have
    to do so in one order on all ranks, and the backend does not notice when they do not; so all communication is in
    the caller's thread, and DDP, which starts its own during backward, is not in it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        world: World,
    ) -> None:
        self.name = "single" if world.size == 1 else "ddp"
        self.module = model
        self._parameters, self._reduction = parameters, reduction
        if world.size > 1:
            _require_same_shapes(model, world)
            _take_from_first(model, world)

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        yield
        self._reduction.keep(tree, shard)

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        return done(self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._reduction.forget()

    def finish(self, tree: ShardTree) -> None:
        sum_kept(self._parameters, lambda group: self._reduction.kept(tree, group))
        self._reduction.forget()


def _require_same_shapes(model: torch.nn.Module, world: World) -> None:
    """Refuse models of different shapes, which the backend would not notice."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors(model).items()]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).digest()
    if len(set(gather_numbers(world, [int.from_bytes(digest, "little")]))) > 1:
        raise InputError(
            f"the model of rank {world.rank} has other parameters or buffers than another rank's",
            rule="every rank builds the same model",
            do="build it from what all ranks know alike",
        )


def _take_from_first(model: torch.nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does."""
    for tensor in _tensors(model).values():
        # As bytes: the backend does not know every type.
        values = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
        if values.numel() > 0:
            world.guarded(lambda values=values: dist.broadcast(values.view(torch.uint8), 0), "a broadcast")  # type: ignore[misc]
            tensor.detach().copy_(values.view(tensor.shape))


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))
