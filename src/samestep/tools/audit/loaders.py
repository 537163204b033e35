"""Observer of loaders: passes over data sets, samples, random draws, counts of evaluations."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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

from samestep.distributed.rng import numpy_generator, python_generator, torch_generator
from samestep.tools.audit.events import user_line
from samestep.tools.audit.session import Session, sample_numbers

_HASHED_BATCHES = 64  # of a pass
_HASHED_VALUES = 64  # of a sample
_HASHED_LEAVES = 4
_HASHED_ITEMS = 256  # of a list of a dataset
_HASHED_VALUES_OF_DATASET = 4096
_COUNT_SIZE = 64  # elements of a tensor that can contain the count of an evaluation
_LIBRARIES = ("torch.", "accelerate.", "lightning.", "pytorch_lightning.", "transformers.")
_PLAIN_BATCH_SAMPLERS = ("NoneType", "BatchSampler", "BatchSamplerShard")
_FETCHES = 16  # observed batches per process


@dataclass
class _Pass:
    """One pass of an iterator over a dataset."""

    number: int
    step: int
    length: int | None  # batches, None if unknown
    pending: deque[Any] = field(default_factory=deque)  # indices that were drawn and not yielded
    batches: int = 0
    samples: int = 0


class LoadingObserver:
    """Observer of all map-style loaders of a process; `before_pass` is called before each pass."""

    def __init__(self, session: Session, before_pass: Callable[[], None]) -> None:
        self._session = session
        self._before_pass = before_pass
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._count = 0
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loader_count = 0
        self._last_ended: _Pass | None = None
        self._fetches = 0
        self._states: dict[str, int] = {}  # of generators before a fetch

    def begin(self, _: None, iterator: Any, loader: Any) -> None:
        """Write the dataset, the sampler and the line of a new pass."""
        self._before_pass()
        dataset = iterator._dataset
        is_map = iterator._dataset_kind == torch_dataloader._DatasetKind.Map
        if not is_map or not hasattr(dataset, "__len__"):
            return
        if loader not in self._loaders:
            self._loaders[loader] = self._loader_count
            self._loader_count += 1
        self._count += 1
        length = None
        if hasattr(iterator._index_sampler, "__len__"):
            length = len(iterator._index_sampler)
        current = _Pass(self._count, self._session.steps, length)
        self._passes[iterator] = current
        # Libraries wrap batch samplers in batch samplers.
        batch_sampler = loader.batch_sampler
        while hasattr(batch_sampler, "batch_sampler"):
            batch_sampler = batch_sampler.batch_sampler
        sampler = getattr(batch_sampler, "sampler", loader.sampler)
        root = dataset
        subset = 0  # hash of the positions of all subsets
        while type(root) is Subset:  # a subclass can select samples in another way
            subset = zlib.crc32(repr([int(i) for i in root.indices]).encode(), subset)
            root = root.dataset
        # Lightning divides the indices of a sampler among ranks, as those of a dataset.
        drawing = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        # The ranks for which a sampler, or accelerate's batch sampler, divides the samples.
        replicas = getattr(sampler, "num_replicas", None)
        self._session.emit(
            "pass",
            number=self._count,
            loader=self._loaders[loader],
            dataset=type(root).__name__,
            samples=len(dataset),
            length=length,
            subset=subset,
            fingerprint=_fingerprint(root),
            sampler=type(sampler).__name__,
            replacement=bool(getattr(drawing, "replacement", False)),
            complete=_is_complete(loader, sampler, len(dataset)),
            shuffled=isinstance(sampler, DistributedSampler) and sampler.shuffle,
            epoch=getattr(sampler, "epoch", None),
            replicas=replicas or getattr(loader.batch_sampler, "num_processes", None),
            batch=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            line=user_line(),
        )

    def resets(self, _: None, iterator: Any, loader: Any, first_iter: bool = False) -> None:
        """Begin a pass of an iterator with persistent workers after the first one."""
        if not first_iter:
            self.begin(None, iterator, loader)

    def drawn(self, index: Any, iterator: Any) -> None:
        """Store a batch of indices until its data are yielded."""
        current = self._passes.get(iterator)
        if current is not None:
            current.pending.append(index)

    def yielded(self, iterator: Any, data: Any) -> None:
        """Write the samples of a batch and hashes of their contents."""
        current = self._passes.get(iterator)
        if current is None:
            return
        samples = sample_numbers(current.pending.popleft())
        # Keys of another type cannot be compared between ranks.
        if samples is None:
            del self._passes[iterator]
            return
        current.batches += 1
        current.samples += len(samples)
        dataset = iterator._dataset
        while type(dataset) is Subset:
            samples = [int(dataset.indices[i]) for i in samples]
            dataset = dataset.dataset
        hashes = _row_hashes(data, len(samples)) if current.batches <= _HASHED_BATCHES else []
        self._session.emit("batch", number=current.number, samples=samples, hashes=hashes)
        if current.batches == current.length:
            self.ended(iterator)  # libraries that know the length do not ask for another batch

    def ended(self, iterator: Any) -> None:
        """Write the end of a complete pass, after the step of its last batch."""
        current = self._passes.get(iterator)
        if current is not None:
            self._last_ended = current
            self._session.emit("pass_end", number=current.number, optimizer=self._session.optimizer)

    def reduces(
        self, tensor: Any, dst: Any = None, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any
    ) -> None:
        """Write that an evaluation reduces the number of samples of its pass to one rank."""
        self.all_reduces(tensor, op)

    def all_reduces(self, tensor: Any, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
        """Write that an evaluation reduces the number of samples of its pass."""
        current = self._last_ended
        # An evaluation adds its values before the next optimizer step.
        is_added = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if current is None or not is_added or current.step != self._session.steps:
            return
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
            return
        if tensor.numel() > _COUNT_SIZE:
            return
        values = tensor.detach().flatten().tolist()
        if op == dist.ReduceOp.SUM and current.samples in values:
            facts = {"number": current.number, "samples": current.samples}
            at = values.index(current.samples)
            self._session.emit("count", **facts, at=at, line=user_line())
        else:
            self._session.emit("added", number=current.number)

    def begins_fetch(self, *_: Any) -> None:
        """Store the states of the generators before a batch, in loader workers too."""
        self._fetches += 1
        self._states = _generator_states() if self._fetches <= _FETCHES else {}

    def ends_fetch(self, _: Any, fetcher: Any, index: Any) -> None:
        """Write the states of the generators that a batch used."""
        before = self._states
        self._states = {}
        if not before:
            return
        after = _generator_states()
        used = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
        samples = sample_numbers(index)
        if used and samples is not None:
            self._session.emit("fetch_draws", samples=samples, states=used)


def observe_loaders(session: Session, before_pass: Callable[[], None]) -> None:
    """Observe the iterators and fetches of all loaders, and the reductions of counts."""
    observer = LoadingObserver(session, before_pass)
    yielded = session.guarded(observer.yielded)
    ended = session.guarded(observer.ended)
    base: Any = torch_dataloader._BaseDataLoaderIter
    next_batch = base.__next__

    # Not by `session.observe`: the end of a pass is an exception.
    def observed_next(self: Any) -> Any:
        try:
            data = next_batch(self)
        except StopIteration:
            ended(self)
            raise
        yielded(self, data)
        return data

    base.__next__ = observed_next
    session.observe(base, "__init__", after=observer.begin)
    session.observe(base, "_reset", after=observer.resets)
    session.observe(base, "_next_index", after=observer.drawn)
    fetcher = torch_fetch._MapDatasetFetcher
    session.observe(fetcher, "fetch", before=observer.begins_fetch, after=observer.ends_fetch)
    # Libraries import the functions from either module.
    for module in (dist, distributed_c10d):
        session.observe(module, "all_reduce", before=observer.all_reduces)
        session.observe(module, "reduce", before=observer.reduces)


def _is_complete(loader: DataLoader[Any], sampler: Any, samples: int) -> bool:
    """Whether a loader yields each sample of the dataset once, on one rank or on all together."""
    # Other batch samplers can leave batches out: accelerate's SkipBatchSampler resumes within an
    # epoch.
    is_plain = type(loader.batch_sampler).__name__ in _PLAIN_BATCH_SAMPLERS
    if not is_plain or not type(sampler).__module__.startswith(_LIBRARIES):
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == samples
    if isinstance(sampler, DistributedSampler):
        # Around another sampler, as of Lightning, it has the length of that sampler.
        return len(sampler.dataset) == samples  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


def _fingerprint(dataset: Any) -> int | None:
    """Return a hash of a dataset's attributes; ranks with equal fingerprints have equal data.

    The result is None without an attribute that has a value for each sample, and with a container
    of unknown type.
    """
    count = len(dataset)
    has_data = False
    result = 0
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        items = [value]
        if isinstance(value, tuple) and all(isinstance(part, torch.Tensor) for part in value):
            items = list(value)
        for item in items:
            description = _description(item)
            if description is None:
                return None
            result = zlib.crc32(f"{name} {description}".encode(), result)
            has_length = hasattr(item, "__len__") and not isinstance(item, str)
            has_data |= has_length and len(item) == count
    if has_data and count > 1:
        return result
    return None


def _description(value: Any) -> str | None:
    """Return a text of some values of a container, or None if it has an unknown type."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and value.is_contiguous():
        flat = value.detach().view(-1)
        step = max(1, len(flat) // _HASHED_VALUES_OF_DATASET)
        return f"{tuple(value.shape)} {flat[::step].tolist()}"
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        items = value[:: max(1, len(value) // _HASHED_ITEMS)]
        return f"{len(value)} {items}" if all(map(_is_plain, items)) else None
    if _is_plain(value):
        return repr(value)
    if hasattr(value, "__len__") or hasattr(value, "__getitem__"):
        return None
    return type(value).__qualname__


def _is_plain(value: Any) -> bool:
    """Whether the text of a value contains it; that of an object may contain its address."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | PurePath | None)


def _leaves(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        yield from _leaves(list(data.values()))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _leaves(value)


def _row_hashes(data: Any, count: int) -> list[list[int]]:
    """Return hashes of the first values of each sample, for the first tensors of a batch."""
    leaves = (one for one in _leaves(data) if one.dim() > 0 and len(one) == count and one.numel())
    hashes = []
    for leaf in islice(leaves, _HASHED_LEAVES):
        if leaf.layout == torch.strided:
            first = leaf.detach().reshape(count, -1)[:, :_HASHED_VALUES]
            rows = first.contiguous().view(torch.uint8).cpu().numpy()
            hashes.append([zlib.crc32(row) for row in rows])
    return hashes


def _generator_states() -> dict[str, int]:
    """Return hashes of the states of the generators of torch, Python and NumPy."""
    return {"torch": torch_generator(), "random": python_generator(), "numpy": numpy_generator()}
