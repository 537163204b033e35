"""Reading of the first batch of a loader, which decides how others are read."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch
from torch.utils.data import TensorDataset

from samestep.data.batch_structure import Plan, plan_of
from samestep.data.process_copy import called_in_copy
from samestep.data.read_generators import OwnGenerators
from samestep.data.read_state import ReadState, comparable
from samestep.data.sample_hashes import hashes_of_batch
from samestep.data.sample_reader import (
    COPY_SECONDS,
    Decision,
    Reading,
    Request,
    SampleReader,
    Samples,
    datasets_of,
)
from samestep.microbatches import microbatch_bounds

MEMORY = "samples depend on those that were read before"
COLLATE = "the collate function does not keep samples apart"
COLLATE_DRAWS = "the collate function draws random numbers"
NO_COPY = "samples cannot be read in a copy of the process"
_CHECKED = 16  # samples of the first batch that are read in a copy of the process
_SLICES = 4  # in which they are collated
_COMPARED_ITEMS = 2**16  # of a list, between ranks
_COMPARED_BYTES = 2**28  # of a tensor or an array


class CheckingReader(SampleReader):
    """Reader that also decides how batches are read (`how` of a request is `check`)."""

    def _reading(self, request: Request) -> Reading:
        """Read a batch; to check the data, read a whole batch, and decide how others are read.

        The decision is made in copies of the process, so that data sets and functions with a memory
        see each sample once, as in a plain loop.
        """
        if request.how != "check":
            return super()._reading(request)
        part = _first_of(request)
        decision = called_in_copy(partial(self._decided, part), COPY_SECONDS)
        if decision is not None and decision.how == "check":
            # In a new copy, in which the data set has not seen the samples.
            seeded = part._replace(draws=decision.draws)
            decision = called_in_copy(partial(self._decided, seeded), COPY_SECONDS)
        if decision is None:
            decision = Decision("plain", draws=False, reason=NO_COPY)
        if decision.how == "plain":
            reading = self._read_plain(request)
        else:
            reading = self._read(request._replace(draws=decision.draws))
        return reading._replace(decision=decision)

    def _decided(self, request: Request) -> Decision:
        """Return how other batches than the first one are read."""
        decision = None
        read, draws = self._first_read(request)
        if draws and not request.draws:
            return Decision("check", draws=True)
        if read is not None and read.samples:
            decision = self._decided_by_collation(request, read)
        elif read is not None:
            decision = Decision("whole", request.draws, reason=COLLATE)
        return decision or Decision("plain", draws=False, reason=MEMORY)

    def _first_read(self, request: Request) -> tuple[Samples | None, bool]:
        """Return the samples, and whether they draw random numbers.

        None for samples that depend on those that were read before.
        """
        begin = ReadState(self.dataset, self._collate)
        states = self._states()
        if not request.draws:
            samples = self._plain(request.indices)
            read = Samples(samples, [False] * len(samples))
        elif self._reads_apart(request):
            read = self._one_by_one(request, seeds=True, watches=True)
        else:
            return None, True
        generators = OwnGenerators(self.dataset, self._collate)
        draws = self._states() != states or bool(generators)
        # A generator that a read has made cannot be seeded for the first sample.
        has_made = not self.generators.are(generators)
        has_others = len(request.indices) != len(read.samples)  # of the data set's choice
        if has_made or has_others or not self._are_repeated(request, read, begin):
            return None, draws
        return read, draws

    def _decided_by_collation(self, request: Request, read: Samples) -> Decision | None:
        """Return how batches are read; None if they depend on those that were made before."""
        # Both before the first collation, which can change the samples.
        probe = hashes_of_batch(request, read)
        samples = [_own(sample) for sample in read.samples]
        begin = ReadState(self.dataset)
        self._seed("collate", request, 0)
        states = self._states()
        first = self._collate(read.samples)
        draws = self._states() != states
        end = ReadState(self._collate)
        # Another batch between equal ones: the function can mix a batch with the one before.
        self._collated(request, [_own(sample) for sample in reversed(samples)])
        again = self._collated(request, [_own(sample) for sample in samples])
        has_changed_samples = ReadState(self.dataset).differs(begin)  # which the data set keeps
        is_repeated = comparable(first, again) and not ReadState(self._collate).differs(end)
        if has_changed_samples or not is_repeated:
            return None
        if draws:
            return Decision("whole", draws=True, reason=COLLATE_DRAWS, probe=probe)
        plan = self._plan_of(first, samples)
        # After parts: the function can write each batch into the same memory.
        last = self._collated(request, samples)
        if not comparable(again, last) or ReadState(self._collate).differs(end):
            return None
        if plan is None:
            return Decision("whole", request.draws, reason=COLLATE, probe=probe)
        return Decision("own", request.draws, plan, probe=probe)

    def _reads_apart(self, request: Request) -> bool:
        """Whether `__getitems__` reads a sample as it does in a batch, with the same draws."""
        if not hasattr(self.dataset, "__getitems__"):
            return True
        first = []
        for indices in (request.indices, request.indices[:1]):
            self._seed("sample", request, 0)
            first.append(self._plain(indices)[:1])
        return comparable(*first)

    def _are_repeated(self, request: Request, read: Samples, begin: ReadState) -> bool:
        """Whether samples are the same, and draw again, when they are read in another order.

        Args:
            request: the request of the samples.
            read: the samples.
            begin: state of the data set before their first reading.
        """
        if not read.samples:
            return True
        end = ReadState(self.dataset, self._collate)
        last = len(read.samples) - 1
        # The last one again at the end: the data set can keep it, or the file that contains it.
        numbers = [*range(last)[::-1], last]
        if not end.differs(begin) and not request.draws:
            # Some of them: no read has left a trace in the data set.
            numbers = [last // 2, 0, last]
        for number in numbers:
            if request.draws:
                self._seed("sample", request, number)
            before = self._states()
            again = self._plain([request.indices[number]])
            # A cache of augmented samples draws in the first read only: samples are those of
            # the epoch in which this process has read them first.
            has_drawn = self._states() != before
            if not comparable([read.samples[number]], again) or has_drawn != read.drew[number]:
                return False
        return not ReadState(self.dataset, self._collate).differs(end)

    def _plan_of(self, data: Any, samples: list[Any]) -> Plan | None:
        """Return how a batch is put together from collated parts; None if it is not."""
        # A padding collate function can agree in slices by chance: also each sample alone.
        ways = [
            microbatch_bounds(len(samples), min(_SLICES, len(samples))),
            [(position, position + 1) for position in range(len(samples))],
        ]
        plan = None
        for bounds in ways:
            try:
                parts = [
                    self._collate([_own(sample) for sample in samples[start:stop]])
                    for start, stop in bounds
                ]
                plan = plan_of(data, parts, [stop - start for start, stop in bounds])
            except Exception:  # boundary: the function collates whole batches only
                return None
            if plan is None:
                break
        return plan


def _first_of(request: Request) -> Request:
    """Return a request of the first samples of a batch."""
    repeats = request.repeats
    if repeats is not None:
        repeats = repeats[:_CHECKED]
    return request._replace(indices=request.indices[:_CHECKED], repeats=repeats)


def values_of_samples(dataset: Any) -> Iterator[Any]:
    """Yield values in memory with one entry per sample: tensors, arrays, and lists of numbers.

    Lists that are data sets too, with their texts; other texts can be paths of a machine.
    """
    for part in datasets_of(dataset):
        if isinstance(part, list | tuple):
            yield part[:: len(part) // _COMPARED_ITEMS + 1]
        elif isinstance(getattr(part, "__len__", None), MethodType):
            held: Any = getattr(part, "__dict__", {}).values()
            if isinstance(part, TensorDataset):
                held = part.tensors
            for value in held:
                yield from _compared(value, len(part))


def _compared(value: Any, size: int) -> Iterator[Any]:
    if isinstance(value, list) and len(value) == size:
        if all(isinstance(one, int | float) for one in value):
            yield value
    elif isinstance(value, torch.Tensor | numpy.ndarray) and value.shape[:1] == (size,):
        yield value[:: value.nbytes // _COMPARED_BYTES + 1]


def _own(sample: Any) -> Any:
    """Return a sample that a collate function can change without an effect on the other one."""
    if isinstance(sample, dict | list | UserDict):
        return copy.copy(sample)
    return sample
