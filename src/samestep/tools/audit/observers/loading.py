"""Observer of loaders: passes over data sets, samples of batches, random draws in fetches, counts of evaluations."""

from __future__ import annotations

import random
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import fetch as torch_fetch

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session, sample_numbers

_HASHED_BATCHES = 64  # of a pass
_HASHED_VALUES = 64  # of a sample
_HASHED_LEAVES = 4
_HASHED_ITEMS = 256  # of a list of a dataset
_HASHED_VALUES_OF_DATASET = 4096
_COUNT_SIZE = 64  # elements of a tensor that can contain the count of an evaluation
_LIBRARIES = ("torch.", "accelerate.", "lightning.", "pytorch_lightning.", "transformers.")
_FETCHES = 16  # observed batches per process


class _Pass:
    """One pass of an iterator over a dataset."""

    def __init__(self, number: int, step: int, length: int | None) -> None:
        self.number = number
        self.step = step
        self.length = length  # batches, None if unknown
        self.pending: deque[Any] = deque()  # batches of indices that were drawn and not yet yielded
        self.batches = 0
        self.samples = 0


class LoadingObserver:
    """Observer of all map-style loaders of a process.

    Args:
        session: the state of the observers.
        before_pass: called when a loader begins a pass.
    """

    def __init__(self, session: Session, before_pass: Callable[[], None]) -> None:
        self._session = session
        self._before_pass = before_pass
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._latest: dict[int, _Pass] = {}  # by loader; a loop that breaks deletes its iterator
        self._count = 0
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loader_count = 0
        self._last_ended: _Pass | None = None

    def begin(self, iterator: Any, loader: Any) -> None:
        """Write the dataset, the sampler and the line of a new pass."""
        self._before_pass()
        is_map = iterator._dataset_kind == torch_dataloader._DatasetKind.Map
        if not is_map or not hasattr(iterator._dataset, "__len__"):
            return
        if loader not in self._loaders:
            self._loaders[loader] = self._loader_count
            self._loader_count += 1
        self._count += 1
        length = (
            len(iterator._index_sampler) if hasattr(iterator._index_sampler, "__len__") else None
        )
        current = _Pass(self._count, self._session.steps, length)
        self._passes[iterator] = self._latest[self._loaders[loader]] = current
        sampler = _sampler(loader)
        root, _ = _root(iterator._dataset, [])
        self._session.emit(
            "pass",
            number=self._count,
            loader=self._loaders[loader],
            dataset=type(root).__name__,
            samples=len(iterator._dataset),
            length=length,
            subset=_subset_hash(iterator._dataset),
            fingerprint=_fingerprint(root),
            sampler=type(sampler).__name__,
            replacement=_draws_with_replacement(sampler),
            complete=_is_complete(loader, sampler, len(iterator._dataset)),
            shuffled=isinstance(sampler, DistributedSampler) and sampler.shuffle,
            epoch=getattr(sampler, "epoch", None),
            replicas=_replicas(loader, sampler),
            batch=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            line=user_line(),
        )

    def drawn(self, iterator: Any, index: Any) -> None:
        """Store a batch of indices until its data are yielded."""
        current = self._passes.get(iterator)
        if current is not None:
            current.pending.append(index)

    def yielded(self, iterator: Any, data: Any) -> None:
        """Write the samples of a batch and hashes of their contents."""
        current = self._passes.get(iterator)
        if current is None:
            return
        positions = sample_numbers(current.pending.popleft())
        if positions is None:
            del self._passes[iterator]
            return
        current.batches += 1
        current.samples += len(positions)
        _, samples = _root(iterator._dataset, positions)
        hashes = _row_hashes(data, len(samples)) if current.batches <= _HASHED_BATCHES else []
        self._session.emit("batch", number=current.number, samples=samples, hashes=hashes)
        if (
            current.batches == current.length
        ):  # libraries that know the length do not ask for another batch
            self._end(current)

    def ended(self, iterator: Any) -> None:
        """Write the end of a complete pass, after the step of its last batch."""
        current = self._passes.get(iterator)
        if current is not None:
            self._end(current)

    def _end(self, current: _Pass) -> None:
        self._last_ended = current
        self._session.emit("pass_end", number=current.number, optimizer=self._session.optimizer)

    def positions(self) -> list[list[int]]:
        """Return the numbers of the passes of known length that have begun and not ended, with their batches."""
        return [
            [one.number, one.batches]
            for one in self._latest.values()
            if 0 < one.batches < (one.length or 0)
        ]

    def counted(self, tensor: Any, operation: Any) -> None:
        """Write that an evaluation reduces the number of samples of its pass."""
        current = self._last_ended
        is_sum = operation == dist.ReduceOp.SUM
        if current is None or not is_sum or current.step != self._session.steps:
            return
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.numel() > _COUNT_SIZE
            or tensor.is_complex()
        ):
            return
        values = tensor.detach().flatten().tolist()
        if current.samples in values:
            position = values.index(current.samples)
            self._session.emit(
                "count",
                number=current.number,
                samples=current.samples,
                at=position,
                line=user_line(),
            )


def observe_loading(session: Session, before_pass: Callable[[], None]) -> None:
    """Observe the iterators of all loaders, and the reductions of counts."""
    observer = LoadingObserver(session, before_pass)
    session.positions = observer.positions
    begin = session.guarded(observer.begin)
    drawn = session.guarded(observer.drawn)
    yielded = session.guarded(observer.yielded)
    ended = session.guarded(observer.ended)
    base: Any = torch_dataloader._BaseDataLoaderIter
    init = base.__init__
    reset = base._reset
    next_index = base._next_index
    next_batch = base.__next__

    def observed_init(self: Any, loader: Any) -> None:
        init(self, loader)
        begin(self, loader)

    def observed_reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        if not first_iter:  # an iterator with persistent workers begins a new pass
            begin(self, loader)

    def observed_next_index(self: Any) -> Any:
        index = next_index(self)
        drawn(self, index)
        return index

    def observed_next(self: Any) -> Any:
        try:
            data = next_batch(self)
        except StopIteration:
            ended(self)
            raise
        yielded(self, data)
        return data

    base.__init__ = observed_init
    base._reset = observed_reset
    base._next_index = observed_next_index
    base.__next__ = observed_next
    _observe_counts(session.guarded(observer.counted))


def _observe_counts(counted: Any) -> None:
    if not dist.is_available():
        return
    all_reduce = dist.all_reduce
    reduce = dist.reduce

    def observed_all_reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
    ) -> Any:
        counted(tensor, op)
        return all_reduce(tensor, op, *args, **kwargs)

    def observed_reduce(
        tensor: Any, dst: Any = None, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
    ) -> Any:
        counted(tensor, op)
        return reduce(tensor, dst, op, *args, **kwargs)

    for module in (dist, distributed_c10d):
        patched: Any = module
        patched.all_reduce = observed_all_reduce
        patched.reduce = observed_reduce


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return the innermost sampler; libraries wrap batch samplers in batch samplers."""
    batch_sampler: Any = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", loader.sampler)


def _replicas(loader: DataLoader[Any], sampler: Any) -> int | None:
    """Return the number of ranks for which a sampler, or accelerate's batch sampler, divides the samples."""
    replicas: int | None = getattr(sampler, "num_replicas", None) or getattr(
        loader.batch_sampler, "num_processes", None
    )
    return replicas


def _draws_with_replacement(sampler: Any) -> bool:
    # Lightning divides the indices of a sampler among ranks, as those of a dataset.
    return bool(
        getattr(
            getattr(getattr(sampler, "dataset", None), "_sampler", sampler), "replacement", False
        )
    )


def _is_complete(loader: DataLoader[Any], sampler: Any, samples: int) -> bool:
    """Whether a loader yields each sample of the dataset once, on one rank or on all ranks together."""
    # Other batch samplers can leave batches out: accelerate's SkipBatchSampler resumes within an
    # epoch.
    is_plain = type(loader.batch_sampler).__name__ in (
        "NoneType",
        "BatchSampler",
        "BatchSamplerShard",
    )
    if not is_plain or not type(sampler).__module__.startswith(_LIBRARIES):
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == samples
    # A distributed sampler around another sampler, as of Lightning, has the length of that sampler.
    is_distributed = isinstance(sampler, DistributedSampler) and len(sampler.dataset) == samples  # type: ignore[arg-type]
    return is_distributed or isinstance(sampler, SequentialSampler)


def _root(dataset: Any, positions: list[int]) -> tuple[Any, list[int]]:
    """Return the dataset below all subsets, and positions in it."""
    while type(dataset) is Subset:
        positions = [int(dataset.indices[i]) for i in positions]
        dataset = dataset.dataset
    return dataset, positions


def _subset_hash(dataset: Any) -> int:
    """Return a hash of the positions of the subsets around a dataset, 0 for none."""
    result = 0
    while type(dataset) is Subset:
        result = zlib.crc32(repr([int(i) for i in dataset.indices]).encode(), result)
        dataset = dataset.dataset
    return result


def _fingerprint(dataset: Any) -> int | None:
    """Return a hash of a dataset's attributes; ranks with equal fingerprints have equal data.

    The result is None without an attribute that has a value for each sample, and with a container
    of unknown type.
    """
    count = len(dataset)
    has_data = False
    result = 0
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        is_tensors = isinstance(value, tuple) and all(
            isinstance(part, torch.Tensor) for part in value
        )
        for item in value if is_tensors else [value]:
            description = _description(item)
            if description is None:
                return None
            result = zlib.crc32(f"{name} {description}".encode(), result)
            has_data |= (
                hasattr(item, "__len__") and not isinstance(item, str) and len(item) == count
            )
    if has_data and count > 1:
        return result
    return None


def _description(value: Any) -> str | None:
    """Return a text of some values of a container, or None if it has an unknown type."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and value.is_contiguous():
        flat = value.detach().view(-1)
        return f"{tuple(value.shape)} {flat[:: max(1, len(flat) // _HASHED_VALUES_OF_DATASET)].tolist()}"
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        items = value[:: max(1, len(value) // _HASHED_ITEMS)]
        if all(map(_is_plain, items)):
            return f"{len(value)} {items}"
        return None
    if _is_plain(value):
        return repr(value)
    if hasattr(value, "__len__") or hasattr(value, "__getitem__"):
        return None
    return type(value).__qualname__


def _is_plain(value: Any) -> bool:
    """Whether the text of a value contains the value; the text of an object may contain its address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | PurePath | None)


def _leaves(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)


def _row_hashes(data: Any, count: int) -> list[list[int]]:
    """Return hashes of the first values of each sample, for the first tensors of a batch."""
    leaves = (
        leaf for leaf in _leaves(data) if leaf.dim() > 0 and len(leaf) == count and leaf.numel() > 0
    )
    hashes = []
    for leaf in islice(leaves, _HASHED_LEAVES):
        if leaf.layout == torch.strided:
            rows = (
                leaf.detach()
                .reshape(count, -1)[:, :_HASHED_VALUES]
                .contiguous()
                .view(torch.uint8)
                .cpu()
                .numpy()
            )
            hashes.append([zlib.crc32(row) for row in rows])
    return hashes


class DrawObserver:
    """Observer of the draws in `fetch`, in loader workers too."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._fetches = 0
        self._before: dict[str, int] = {}

    def begins_fetch(self) -> None:
        """Store the states of the generators before a batch."""
        self._fetches += 1
        self._before = _states() if self._fetches <= _FETCHES else {}

    def ends_fetch(self, index: Any) -> None:
        """Write the states of the generators that a batch used."""
        before = self._before
        self._before = {}
        if not before:
            return
        after = _states()
        used = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
        samples = sample_numbers(index)
        if used and samples is not None:
            self._session.emit("fetch_draws", samples=samples, states=used)


def observe_fetches(session: Session) -> None:
    """Observe the fetches of map-style datasets."""
    observer = DrawObserver(session)
    begins = session.guarded(observer.begins_fetch)
    ends = session.guarded(observer.ends_fetch)
    patched: Any = torch_fetch._MapDatasetFetcher
    fetch = patched.fetch

    def observed_fetch(self: Any, index: Any) -> Any:
        begins()
        data = fetch(self, index)
        ends(index)
        return data

    patched.fetch = observed_fetch


def _states() -> dict[str, int]:
    """Return hashes of the states of the generators of torch, Python and NumPy."""
    states = {"torch": state_hash(torch.get_rng_state()), "random": hash(random.getstate()[1])}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(keys.tobytes(), position)
    return states


def state_hash(state: torch.Tensor) -> int:
    """Return a hash of the state of a generator."""
    return zlib.crc32(state.numpy().tobytes())
