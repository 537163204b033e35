"""Iteration of a `DataLoader` of torch in which each rank reads its own rows of a batch.

Subclasses of torch's iterators request and complete batches. Samplers, workers, persistent workers
and pinning are torch's. The first batch decides how others are read (`sample_reader.Decision`), and
a word of each rank per batch guards the decision.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
from torch.utils.data import (
    DataLoader,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from samestep.data.batch_structure import (
    Leaf,
    Leaves,
    OtherStructure,
    Plan,
    content_of,
    leaves_of,
    pack,
    rebuilt,
    shapes_of,
    small_leaves,
    unpack,
)
from samestep.data.epoch_order import EpochOrder
from samestep.data.own_rows_decision import CheckingReader, values_of_samples
from samestep.data.sample_reader import (
    Decision,
    Guarded,
    How,
    Reading,
    Request,
    as_it_is,
    init_worker,
    raise_failure,
)
from samestep.distributed.logging import logger
from samestep.distributed.resources import require_files_of_workers
from samestep.errors import PeerLostError, RankMismatchError

_FAILED = -1  # in place of the hash of shapes in the word of a rank
_DREW = -2
_OTHER = -3
_MODES = ("own", "whole", "plain")  # at most 4: `draws` is the bit above
_READ_ALONE = "a batch was not made of its rows"

Bounds = list[tuple[int, int]]


class BatchRanks(Protocol):
    """Ranks that read batches together, as one of them sees them (`view/view.py`)."""

    rank: int
    size: int

    def can_send(self) -> bool:
        """Whether this point of the program is one that all ranks reach."""

    def bounds(self, rows: int) -> Bounds | None:
        """Return the own rows of each rank in a batch; None if a rank would have none."""

    def word(self, samples: int, *fields: int) -> list[list[int]]:
        """Return the integers of all ranks, which must have the same hash of `samples`."""

    def gather(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return the rows of all ranks."""

    def rows(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return a tensor with the whole shape, of the own rows."""

    def decisions_of(
        self, dataset: Any, collate: Any, line: Hashable
    ) -> tuple[MutableMapping[Hashable, Decision], Hashable]:
        """Return the decisions of earlier loaders, and the key of a loader of a line."""


@dataclass
class OwnRows:
    """How a loader reads; its iterations share it.

    Attributes:
        ranks: the ranks, or None on one process.
        seed: seed of the samples' random numbers; None for torch's base seed of an iteration.
        epoch: number of the epoch of the next iteration, with a seed.
        leaves_out: number of batches at the start of an iteration that are not read.
        samples: number of samples that this rank has read (`read`), and of those of whole batches
            (`needed`).
        decisions: decisions of the first batches of loaders, by key.
        key: key of the loader.
        has_drawn: a sample has drawn a random number before a decision.
        is_resumed: an earlier process has read samples of the loop.
    """

    ranks: BatchRanks | None
    seed: int | None = None
    epoch: int = 0
    leaves_out: int = 0
    samples: Counter[str] = field(default_factory=Counter)
    decisions: MutableMapping[Hashable, Decision] = field(default_factory=dict)
    key: Hashable = None
    has_drawn: bool = False
    is_resumed: bool = False

    @property
    def decision(self) -> Decision | None:
        """How batches are read; None before the first batch."""
        return self.decisions.get(self.key)

    @decision.setter
    def decision(self, decision: Decision) -> None:
        self.decisions[self.key] = decision

    @property
    def draws(self) -> bool:
        """Whether samples draw random numbers, and are seeded one by one."""
        decision = self.decision
        return self.has_drawn if decision is None else decision.draws


def own_iterator(loader: DataLoader[Any], state: OwnRows) -> _BaseDataLoaderIter:
    """Return an iterator over the whole batches of a loader, of which each rank reads its own rows.

    Args:
        loader: a loader of torch, or of a subclass.
        state: state of the loader's iterations.
    """
    kind: type[_OwnRowsIterator] = _SingleProcessIterator
    if loader.num_workers > 0:
        loader.check_worker_number_rationality()
        require_files_of_workers(loader.num_workers)
        kind = _WorkersIterator
    # The constructor of torch requests batches, for which the state must be there.
    iterator = kind.__new__(kind)
    iterator.state = state
    kind.__init__(iterator, loader)
    return iterator


class _OwnRowsIterator(_BaseDataLoaderIter):
    """Part of both iterators, which torch initializes before it makes fetchers or workers."""

    state: OwnRows

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        # torch would divide the samples of data pipes among the processes of a group.
        self._world_size = 1
        self._rank = 0
        self._dataset: Any
        is_pipe = isinstance(self._dataset, MapDataPipe)
        is_map = self._dataset_kind == _DatasetKind.Map and not is_pipe
        # Without `in_order`, batches come in the order in which workers are ready: another one on
        # each rank, so that their rows are of different batches.
        self._reads_samples = is_map and self._auto_collation and getattr(loader, "in_order", True)
        self._script_dataset = self._dataset
        if self._reads_samples:
            self._reader = CheckingReader(
                self._dataset,
                self._collate_fn,
                sets_epoch=self.state.seed is not None,
            )
            self._dataset = self._reader
            self._collate_fn = as_it_is
        else:
            self._collate_fn = Guarded(self._collate_fn)
            if is_map and not self._auto_collation:
                self._dataset = Guarded(self._dataset)
        self._iterations = 0
        self._counts_repeats = not _draws_once(loader)
        if self._num_workers == 0:  # otherwise torch calls `_reset`
            self._begin()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._iterations += not first_iter
        self._begin()

    def _begin(self) -> None:
        # The requests of whole batches, of which each rank requests its own rows.
        self._pending: deque[Request] = deque()
        self._held = 0
        self._drawn: Counter[Any] = Counter()
        if self.state.seed is None:
            self._seed = int(self._base_seed)
            self._epoch = self._iterations
        else:
            self._seed = self.state.seed
            self._epoch = self.state.epoch
        # Drawn all the same: later indices of a sampler follow from earlier draws.
        for _ in range(self.state.leaves_out):
            next(self._sampler_iter)

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if not self._reads_samples:
            return index
        indices = list(index)
        repeats: list[int] | None = None
        if self._counts_repeats:
            repeats = []
            for one in indices:
                repeats.append(self._drawn[one])
                self._drawn[one] += 1
        return self._requested(indices, repeats)

    def _requested(self, indices: list[Any], repeats: list[int] | None) -> Request:
        ranks = self.state.ranks
        decision = self.state.decision
        bounds = [(0, len(indices))] if ranks is None else ranks.bounds(len(indices))
        how = "whole" if decision is None else decision.how
        # A batch of one sample shows no division.
        if decision is None and len(indices) > 1 and not self._awaits_decision():
            how = "check"
        elif how == "own" and bounds is None:
            how = "whole"
        request = Request(how, indices, repeats, self._seed, self._epoch, self.state.draws)
        self._pending.append(request)
        if how == "own" and ranks is not None and bounds is not None:
            own = slice(*bounds[ranks.rank])
            own_repeats = None if repeats is None else repeats[own]
            request = request._replace(indices=indices[own], repeats=own_repeats)
        return request

    def _awaits_decision(self) -> bool:
        is_checked = any(pending.how == "check" for pending in self._pending)
        return is_checked and self.state.decision is None

    def __next__(self) -> Any:
        reading = super().__next__()
        if not self._reads_samples:
            return reading
        pending = self._pending.popleft()
        batch = self._completed(pending, reading)
        self._release()
        return batch

    def _release(self) -> None:
        """Request the batches that waited for a decision."""

    def _completed(self, pending: Request, reading: Reading) -> Any:
        """Return the whole batch of a reading, after an exchange between the ranks."""
        state = self.state
        ranks = state.ranks
        how = pending.how
        state.samples.update(read=reading.samples, needed=len(pending.indices))
        if ranks is None or not ranks.can_send():
            return self._completed_alone(pending, reading)
        # A failure is sent in the word, and not raised here: the other ranks would wait in `word`.
        leaves: Leaves = []
        small: list[int] = []
        packed = torch.empty(0, dtype=torch.uint8)
        status = 0
        if reading.failure is not None:
            status = _FAILED
        elif reading.drew:
            status = _DREW
        elif how == "own":
            try:
                leaves = leaves_of(reading.data, _plan(state.decision))
                status = shapes_of(leaves, reading.samples)
                small = small_leaves(leaves, len(pending.indices))
                packed = pack([leaves[number] for number in small])
            except OtherStructure:
                status = _OTHER
        elif how == "check":
            status = content_of([reading.data, *values_of_samples(self._script_dataset)])
        last = reading.samples
        if reading.decision is not None:
            last = _MODES.index(reading.decision.how) + 4 * reading.decision.draws
        words = ranks.word(zlib.crc32(repr(pending.indices).encode()), status, len(packed), last)
        statuses, lengths, counts = ([word[at] for word in words] for at in (1, 2, 3))
        if min(statuses) >= 0 and how == "check":
            _require_same_content(statuses)
            self._decide(reading.decision, counts)
            return reading.data
        if min(statuses) >= 0 and how != "own":
            return reading.data
        if min(statuses) >= 0 and len(set(statuses)) == 1 and all(counts):
            gathered: dict[int, Any] = {}
            if small:
                every = ranks.gather(packed, _spans(lengths), 1)
                messages = [every[start:stop] for start, stop in _spans(lengths)]
                values = unpack(messages, counts, [leaves[number] for number in small])
                gathered = dict(zip(small, values, strict=True))
            # `__getitems__` of a data set can return fewer samples than indices. Then the own rows
            # are not those of a divided call.
            is_complete = sum(counts) == len(pending.indices)
            join = ranks.rows if is_complete else ranks.gather
            return self._joined(reading.data, gathered, _spans(counts), join)
        return self._read_again(pending, reading.failure, statuses, counts)

    def _completed_alone(self, pending: Request, reading: Reading) -> Any:
        """Return the batch of a reading without the other ranks."""
        if reading.failure is not None:
            raise_failure(reading.failure)
        if reading.decision is not None and self.state.ranks is None:
            self._adopt(reading.decision)
        if reading.drew:
            self._draw_from_now_on()
        is_part = pending.how == "own" and self.state.ranks is not None
        if reading.drew or is_part:
            reading = self._whole(pending)
            if reading.failure is not None:
                raise_failure(reading.failure)
        return reading.data

    def _decide(self, decision: Decision | None, codes: Sequence[int]) -> None:
        assert decision is not None
        if len(set(codes)) > 1:
            reason = decision.reason or "ranks have decided differently"
            decision = Decision("whole", any(code & 4 for code in codes), reason=reason)
        self._adopt(decision)

    def _adopt(self, decision: Decision) -> None:
        self.state.decision = decision
        ranks = self.state.ranks
        if ranks is not None and ranks.rank != 0:
            return
        name = type(self._script_dataset).__name__
        reason = decision.reason
        if ranks is not None and decision.how != "own":
            logger.info("%s: batches read whole on every process: %s", name, reason)
        if decision.how == "plain" and self.state.is_resumed:
            logger.warning("%s: results can differ from an uninterrupted run: %s", name, reason)

    def _draw_from_now_on(self) -> None:
        self.state.has_drawn = True
        if self.state.decision is not None:
            self.state.decision = replace(self.state.decision, draws=True)

    def _joined(
        self,
        data: Any,
        gathered: dict[int, Any],
        bounds: Bounds,
        join: Callable[[torch.Tensor, Bounds, int], torch.Tensor],
    ) -> Any:
        """Return the whole batch: leaves that were gathered at once, and the others by `join`."""
        numbers = count()

        def whole(value: Any, leaf: Leaf) -> Any:
            number = next(numbers)
            if number in gathered:
                value = gathered[number]
                if isinstance(value, torch.Tensor) and self._pin_memory:
                    return value.pin_memory()
                return value
            if leaf.kind == "rows":
                return join(value, bounds, leaf.factor)
            return value

        return rebuilt(data, _plan(self.state.decision), whole)

    def _read_again(
        self, pending: Request, first: Any, statuses: list[int], counts: list[int]
    ) -> Any:
        """Read a batch whole on all ranks, after a failure, a late draw or other shapes.

        A failure of the first reading ends the iteration even if the second one succeeds, as on one
        process.
        """
        ranks = self.state.ranks
        assert ranks is not None
        decision = self.state.decision
        reads_own = decision is not None and decision.how == "own"
        if _DREW in statuses:
            self._draw_from_now_on()
        elif reads_own and all(counts) and _FAILED not in statuses:
            self._adopt(Decision("whole", self.state.draws, reason=_READ_ALONE))
        reading = self._whole(pending)
        failure = reading.failure
        if failure is None and _DREW not in statuses:
            # After a draw, the first reading had other random numbers.
            failure = first
        status = 0 if failure is None else _FAILED
        # 0 in place of the hash: the first word has compared the samples.
        words = ranks.word(0, status)
        failed = [rank for rank, word in enumerate(words) if word[1] == _FAILED]
        if failure is not None:
            raise_failure(failure)
        if failed:
            raise PeerLostError(
                f"rank {failed[0]} cannot read a sample that this rank can read",
                expected="data that are equal on all ranks",
                fix="read the message of that rank; check its file system",
                code="E_RANK_BATCH",
            )
        return reading.data

    def _whole(self, pending: Request) -> Reading:
        decision = self.state.decision
        how: How = "whole"
        if decision is not None and decision.how == "plain":
            how = "plain"
        request = pending._replace(how=how, draws=self.state.draws)
        reading = self._reader.__getitems__(request)
        if reading.drew:  # before a decision
            return self._reader.__getitems__(request._replace(draws=True))
        return reading


class _SingleProcessIterator(_SingleProcessDataLoaderIter, _OwnRowsIterator):
    pass


class _WorkersIterator(_MultiProcessingDataLoaderIter, _OwnRowsIterator):
    @property
    def _worker_init_fn(self) -> Any:
        # torch's constructor assigns the function of the loader, and reads this one.
        init = self._init_of_script
        if self._dataset is self._script_dataset:
            return init
        return partial(init_worker, self._script_dataset, init)

    @_worker_init_fn.setter
    def _worker_init_fn(self, init: Any) -> None:
        self._init_of_script = init

    def _try_put_index(self) -> None:
        # No worker reads ahead before the decision, since it would read whole batches.
        if self._reads_samples and self._awaits_decision():
            self._held += 1
        else:
            super()._try_put_index()

    def _try_get_data(self, *arguments: Any) -> Any:
        try:
            return super()._try_get_data(*arguments)  # type: ignore[no-untyped-call]
        except (OSError, EOFError) as error:
            # A killed worker closes its connections before it counts as ended, for torch too.
            ready = wait([worker.sentinel for worker in self._workers], timeout=1)
            if not ready:
                raise
            ended = [worker.pid for worker in self._workers if worker.sentinel in ready]
            raise RuntimeError(f"DataLoader worker (pid(s) {ended}) exited unexpectedly") from error

    def _release(self) -> None:
        while self._held and not self._awaits_decision():
            self._held -= 1
            super()._try_put_index()


def _draws_once(loader: DataLoader[Any]) -> bool:
    """Whether the sampler of a loader draws no index twice in an epoch."""
    # Otherwise repeats are counted, so that an index that comes twice has two augmentations.
    if isinstance(loader.batch_sampler, EpochOrder):
        return True
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(sampler) is RandomSampler:  # a subclass can draw any indices
        # Further samples are drawn from another permutation.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, SubsetRandomSampler)


def _plan(decision: Decision | None) -> Plan:
    if decision is None or decision.plan is None:  # of another iteration, which is read whole since
        raise OtherStructure
    return decision.plan


def _spans(lengths: Sequence[int]) -> Bounds:
    ends = list(accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _require_same_content(contents: Sequence[int]) -> None:
    other = next((rank for rank, content in enumerate(contents) if content != contents[0]), None)
    if other is not None:
        raise RankMismatchError(
            f"ranks 0 and {other} read different data for the same samples",
            expected="equal data on all ranks",
            fix="read the same files on every rank, and draw from torch, NumPy or Python",
            code="E_RANK_BATCH",
        )
