"""Global batches, shard by shard, from any cursor."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, default_collate

from samestep.config import DEFAULT_PREFETCH, BadSamples
from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch, Shard
from samestep.data.order import Indices, global_order, grouped_order
from samestep.data.samples import Collate, RequestQueue, ShardDataset, ShardRequest, SizedDataset, Unusable
from samestep.data.transfer import prefetched
from samestep.errors import DataError, InputError
from samestep.runtime.rank import die_with_parent
from samestep.runtime.world import World
from samestep.sharding import owned_shards, require_enough_shards, shard_bounds

# How torch's warning begins that there are more workers than cores.
MANY_WORKERS = "This DataLoader will create"
# For how long a worker whose connection is broken may still seem alive.
_END_SECONDS = 2.0


class Loader:
    """Iterating over it once is one epoch, from the cursor to the end of the data.

    The next iteration is the next epoch, with its own order; nothing like `set_epoch` can be forgotten. Each
    rank loads its own shards of every global batch; the last batch of an epoch holds what is left.

    Attributes:
        cursor: where the batch handed out last ends. Assign it to go on from there; it costs the same wherever it
            points.
        batch_size: samples in a global batch.
        skips: samples that cannot be used are left out.
        skipped: what was wrong with the samples that this rank has left out; whoever tells of them empties it.
        counts_tokens: the data can tell tokens from what only fills up.
        workers: processes that make samples.
        prefetch: shards that each of them makes ahead.

    Args:
        dataset: `__len__` and `__getitem__`, which raises `DataError` for a sample that cannot be used.
        shards: fixed slices of each batch.
        shuffle: another order in each epoch, a function of seed and epoch.
        workers: processes that make samples, 0 for none besides this one.
        prefetch: shards that each of them makes ahead; no result depends on either.
        collate: from a list of samples to what the engine is given.
        bad_samples: `stop`: a sample that cannot be used is raised; `skip`: it is left out of its shard.
        lengths: one a sample; samples of like length share a global batch, so that little is padded. The order is then
            a function of seed, epoch, lengths and batch size.
        count_tokens: from a collated shard to its tokens, and its places with those that only fill up.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        *,
        batch_size: int,
        shards: int,
        world: World,
        seed: int = 0,
        shuffle: bool = False,
        workers: int = 0,
        prefetch: int = DEFAULT_PREFETCH,
        collate: Collate = default_collate,
        bad_samples: BadSamples = "stop",
        lengths: Sequence[int] | None = None,
        count_tokens: Callable[[Any], tuple[int, int]] | None = None,
    ) -> None:
        require_enough_shards(shards, world.data.size)
        if batch_size < shards:
            raise InputError(
                f"batch_size is {batch_size} but there are {shards} shards, so some would be empty",
                rule="batch_size >= shards (batch_size counts the samples of all ranks together)",
                do=f"batch_size={shards} or more, or shards={max(1, batch_size)} or fewer",
            )
        if len(dataset) == 0:
            raise DataError("the dataset is empty", rule="at least one sample", do="look at the path and filters")
        if lengths is not None and len(lengths) != len(dataset):
            raise InputError(
                f"there are {len(lengths)} lengths for {len(dataset)} samples", rule="one a sample", do="count them"
            )
        self.cursor = Cursor()
        self.batch_size = batch_size
        self.workers = workers
        self.skips = bad_samples == "skip"
        self.skipped: list[str] = []
        self.counts_tokens = count_tokens is not None
        self._count_tokens = count_tokens
        self._counts = (0, 0, 0)
        self._size, self._shards = len(dataset), shards
        self._seed, self._shuffle, self._world = seed, shuffle, world
        self._lengths = None if lengths is None else numpy.asarray(lengths, dtype=numpy.int64)
        self._shard_dataset = ShardDataset(dataset, collate, seed, bad_samples)
        self._open(workers, prefetch)

    def with_workers(self, workers: int, prefetch: int) -> Loader:
        """The same data from its cursor on, made by other workers, which are this loader's own to close."""
        other = copy(self)
        other.skipped, other._counts = [], (0, 0, 0)
        other._open(workers, prefetch)
        return other

    def close(self) -> None:
        """End the workers; the next pass starts others."""
        iterator = self._loader._iterator
        if self.workers and iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None

    def _open(self, workers: int, prefetch: int) -> None:
        self.workers, self.prefetch = workers, prefetch
        self._queue = RequestQueue()
        self._loader: DataLoader[Shard | Unusable] = DataLoader(
            self._shard_dataset,
            batch_size=None,
            sampler=self._queue,
            num_workers=workers,
            prefetch_factor=prefetch if workers > 0 else None,
            collate_fn=_as_it_is,
            pin_memory=self._world.device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_begin_worker if workers > 0 else None,
            # Forks of the rank, not of the fork server: they end with it, and take what cannot be pickled.
            multiprocessing_context="fork" if workers > 0 else None,
        )

    def __len__(self) -> int:
        """Global batches in a whole epoch."""
        return (self._size + self.batch_size - 1) // self.batch_size

    @property
    def samples(self) -> int:
        """Samples in a whole epoch."""
        return self._size

    def __iter__(self) -> Iterator[GlobalBatch]:
        epoch = self.cursor.epoch
        order = self._order(epoch)
        starts = range(self.cursor.samples, self._size, self.batch_size)
        batches = [order[start : start + self.batch_size] for start in starts]
        self._queue.requests = [request for batch in batches for request in self._requests(epoch, batch)]
        shards = prefetched(self._loaded(), self._world.device)
        for start, batch in zip(starts, batches, strict=True):
            parts = tuple(next(shards) for _ in self._filled(len(batch), self._rank))
            fillers = tuple(next(shards) for _ in range(self._missing(len(batch))))
            stop = start + len(batch)
            end = Cursor(epoch, stop) if stop < self._size else Cursor(epoch + 1, 0)
            self.cursor = end
            yield GlobalBatch(Cursor(epoch, start), end, batch, self._shards, parts, fillers)

    def endless(self) -> Iterator[GlobalBatch]:
        """One epoch after the other."""
        while True:
            yield from self

    def take_counts(self) -> tuple[int, int, int]:
        """Samples, tokens and places of the shards that this rank has loaded since this was last asked."""
        counts, self._counts = self._counts, (0, 0, 0)
        return counts

    def make_again(self, batch: GlobalBatch) -> None:
        """Make this rank's shards of a batch once more, in this process, to see how long that takes."""
        for request in self._requests(batch.begin.epoch, batch.indices):
            self._loader.dataset[request]

    def _order(self, epoch: int) -> Indices:
        if self._lengths is None:
            return global_order(self._size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        return grouped_order(self._lengths, self.batch_size, seed=self._seed, epoch=epoch, shuffle=self._shuffle)

    def _requests(self, epoch: int, batch: Indices) -> list[ShardRequest]:
        bounds = shard_bounds(len(batch), self._shards)
        own = [ShardRequest(epoch, n, batch[slice(*bounds[n])]) for n in self._filled(len(batch), self._rank)]
        # Two samples, where there are two: batch norm trains on no less.
        filler = ShardRequest(epoch, 0, batch[:2], is_filler=True)
        return own + [filler] * self._missing(len(batch))

    def _missing(self, size: int) -> int:
        """By how many shards this rank has fewer than another one, where ranks have to compute as many."""
        if not self._world.layout.is_in_step:
            return 0
        counts = [len(self._filled(size, rank)) for rank in range(self._world.data.size)]
        return max(counts) - counts[self._rank]

    @property
    def _rank(self) -> int:
        return self._world.data.rank

    def _filled(self, size: int, rank: int) -> list[int]:
        """The shards of a rank that have samples in a batch of `size`."""
        bounds = shard_bounds(size, self._shards)
        owned = owned_shards(self._shards, self._world.data.size, rank)
        return [number for number in owned if bounds[number][0] < bounds[number][1]]

    def _loaded(self) -> Iterator[Shard]:
        for item in self._items():
            if isinstance(item, Unusable):
                raise item.error
            self.skipped += item.skipped
            if self._count_tokens is not None and item.size:
                tokens, places = self._count_tokens(item.data)
                before = self._counts
                self._counts = (before[0] + item.size, before[1] + tokens, before[2] + places)
            yield item

    def _items(self) -> Iterator[Shard | Unusable]:
        try:
            yield from self._loader
        except (ConnectionError, EOFError) as error:
            # A worker that is killed while it hands something over breaks the connection a moment before the system
            # tells of its end, on which torch speaks up, here or in its handler of SIGCHLD.
            iterator, deadline = self._loader._iterator, time.monotonic() + _END_SECONDS
            while iterator is not None and time.monotonic() < deadline:
                for worker in iterator._workers:  # type: ignore[attr-defined]
                    if not worker.is_alive():
                        raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly") from error
                time.sleep(0.05)
            raise


loader = Loader  # as a function reads in a loop: `for batch in samestep.loader(...)`


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(number: int) -> None:
    die_with_parent()
    # torch lets a worker die of SIGTERM; where the rank means to reach the end of its step, it still needs data.
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(1)
