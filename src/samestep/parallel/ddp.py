"""torch's DistributedDataParallel, with a communication hook that sums in the order the recipe asks for."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import PeerLostError
from samestep.parallel.flat import taken_apart
from samestep.parallel.kept import sum_kept
from samestep.parallel.lane import Lane
from samestep.parallel.reduction import Reduction
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World

_Future = torch.futures.Future[torch.Tensor]


class DdpStrategy:
    """A replica of the model a rank; gradients meet while backward of the last shard runs."""

    name = "ddp"
    sums_late = False

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        world: World,
    ) -> None:
        self._parameters, self._reduction, self._world = parameters, reduction, world
        self._lane = Lane(world.device)
        self._now: tuple[ShardTree, int] | None = None
        # Said of every parameter with a dimension of 1, whose stride may be anything; costs one copy of the gradient.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=world.strategy.bucket_mb,
            **_own_buffers(),  # type: ignore[arg-type]
        )
        self._ddp.register_comm_hook(None, self._sum_bucket)
        self.module: torch.nn.Module = self._ddp

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        # Where some rank has no samples at all, DDP would wait for it; then all ranks sum in `finish`.
        if last and tree.is_shared_by_all(self._world.size):
            self._now = (tree, shard)
            with self._named_failures():
                yield
            return
        with self._unwrapped(tree), self._ddp.no_sync():
            yield
        self._reduction.keep(tree, shard)

    @contextmanager
    def _unwrapped(self, tree: ShardTree) -> Iterator[None]:
        """Go round DDP where some rank has no samples.

        In the forward after its first step DDP makes its buckets anew, and all ranks agree on them: one that computes
        nothing would be waited for.
        """
        self.module = self._ddp if tree.is_shared_by_all(self._world.size) else self._ddp.module
        try:
            yield
        finally:
            self.module = self._ddp

    def sum_vectors(self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int) -> _Future:
        return self._lane.submit(lambda: self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._reduction.forget()

    def finish(self, tree: ShardTree) -> None:
        if not tree.is_shared_by_all(self._world.size):
            with self._named_failures():
                self._sum_kept(tree)
        self._reduction.forget()

    def _sum_bucket(self, state: object, bucket: dist.GradBucket) -> _Future:
        assert self._now is not None
        tree, last = self._now
        parameters, flat = _parameters_of(bucket), bucket.buffer()
        gradients = taken_apart(flat, parameters)  # bucket.gradients() takes every parameter for contiguous
        return self._lane.submit(lambda: self._reduction.bucket(tree, last, parameters, gradients, flat))

    def _sum_kept(self, tree: ShardTree) -> None:
        sum_kept(
            self._parameters,
            lambda group: self._lane.submit(lambda: self._reduction.kept(tree, group)).wait(),
        )

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Backward only says that a future failed; say why."""
        try:
            yield
        except RuntimeError as error:
            self._lane.raise_failure()
            if isinstance(error, dist.DistError):
                raise PeerLostError(f"rank {self._world.rank} lost its connection: {error}") from error
            raise


def _parameters_of(bucket: dist.GradBucket) -> list[torch.nn.Parameter]:
    return cast(list[torch.nn.Parameter], bucket.parameters())


def _own_buffers() -> dict[str, bool]:
    """Tell DDP to leave buffers alone: the engine averages them over shards. torch 2.13 renamed the argument."""
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
