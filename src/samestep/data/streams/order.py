"""Order of samples in sharded files: each microbatch of the global batches draws from its own range of the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy

from samestep.data.order import DatasetOrder, Indices, random_order
from samestep.data.streams.mixture import quotas
from samestep.distributed.rng import derive_seed
from samestep.errors import InputError
from samestep.microbatches import microbatch_bounds

_KEPT_PASSES = 3  # orders of files in memory per source; slots are in at most two passes, unless sources are tiny


class Part(NamedTuple):
    """Files of one source among the files of a dataset, with its weight in a mixture.

    Attributes:
        name: name of the source; empty for the only one.
        sizes: number of samples in each file.
        first_file: number of the first file in the dataset.
        first_sample: index of the first sample in the dataset.
        weight: weight in the mixture, positive.
    """

    name: str
    sizes: Indices
    first_file: int = 0
    first_sample: int = 0
    weight: float = 1.0

    @property
    def samples(self) -> int:
        """Number of samples in all files."""
        return int(self.sizes.sum())


class BatchSizes(NamedTuple):
    """Sizes on which the division of an epoch into slots depends.

    Attributes:
        batch_size: samples of a complete global batch.
        microbatches: microbatches of a complete global batch, the number of slots.
        last_microbatches: microbatches of the last batch, if it has fewer samples.
    """

    batch_size: int
    microbatches: int
    last_microbatches: int


class Draws(NamedTuple):
    """Samples at a slice of an epoch.

    Attributes:
        indices: indices of the dataset.
        repeats: distinct numbers for the same index in one epoch; 0 for samples that occur once.
    """

    indices: Indices
    repeats: Indices


class StreamOrder(ABC):
    """Order of the samples of sharded files in one epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> Indices:
        return self.draws(positions).indices

    @abstractmethod
    def draws(self, positions: slice) -> Draws:
        """Return the samples at positions."""

    @abstractmethod
    def files_ahead(self, positions: slice, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the files of a batch, then the next ones, for slots.

        Args:
            positions: the batch.
            slots: numbers of the slots.
        """


class SequentialOrder(StreamOrder):
    """Order of the files, for an evaluation.

    Args:
        parts: the sources.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._ends = numpy.cumsum(numpy.concatenate([part.sizes for part in parts]))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def draws(self, positions: slice) -> Draws:
        indices = DatasetOrder(len(self))[positions]
        return Draws(indices, numpy.zeros_like(indices))

    def files_ahead(self, positions: slice, slots: Sequence[int]) -> tuple[int, ...]:
        return _files_between(self._ends, positions.start, positions.stop)


class SlotOrder(StreamOrder):
    """Order in which slot s, which is microbatch s of every global batch, draws from range s of the permuted files.

    1. In each pass over a source, a random permutation of (seed, pass) orders its files. The samples in this order are
       divided into one range per slot, in proportion to the samples of the slots in an epoch.
    2. The samples of a slot in an epoch are divided into windows of `window` positions. Each source has a fixed number
       of positions in a window, in proportion to its weight, for its next samples. A random permutation of (seed,
       epoch, slot, window) orders the positions.

    With one source, a pass is an epoch, and each sample occurs once. In a mixture, passes continue over epochs. The
    memory is proportional to the files and to the windows of all slots. The time of a slice does not depend on its
    position.

    Args:
        parts: the sources.
        sizes: division of global batches.
        window: positions of a window, at least 1.
        samples: number of samples in an epoch; with one source, its number of samples.
        seed: seed of the order.
        epoch: number of the epoch.

    Raises:
        InputError: a source of a mixture has too few samples, or too small a weight for a window.
    """

    def __init__(
        self, parts: Sequence[Part], sizes: BatchSizes, *, window: int, samples: int, seed: int, epoch: int
    ) -> None:
        self._parts, self._window, self._samples, self._seed, self._epoch = parts, window, samples, seed, epoch
        self._batch_size, self._complete = sizes.batch_size, samples // sizes.batch_size
        bounds = microbatch_bounds(sizes.batch_size, sizes.microbatches)
        last = microbatch_bounds(samples % sizes.batch_size, sizes.last_microbatches)
        last += [(last[-1][1],) * 2] * (sizes.microbatches - len(last))
        self._bounds, self._last_bounds = numpy.array(bounds), numpy.array(last)
        self._share = self._bounds[:, 1] - self._bounds[:, 0]
        ends = numpy.cumsum(self._complete * self._share + self._last_bounds[:, 1] - self._last_bounds[:, 0])
        self._slot_ends = [0, *(int(end) for end in ends)]
        self._ranges = [self._ranges_of(part) for part in parts]
        self._permutation = lru_cache(2 * sizes.microbatches)(self._new_permutation)
        self._sequence = lru_cache(_KEPT_PASSES * len(parts))(self._new_sequence)
        self._require_samples()
        self._first_passes = [self._first_pass(number) for number in range(len(parts))]

    def __len__(self) -> int:
        return self._samples

    def draws(self, positions: slice) -> Draws:
        at = numpy.arange(*positions.indices(self._samples), dtype=numpy.int64)
        batch, offset = numpy.divmod(at, self._batch_size)
        draws = Draws(numpy.empty_like(at), numpy.zeros_like(at))
        for bounds, chosen in ((self._bounds, batch < self._complete), (self._last_bounds, batch >= self._complete)):
            slots = numpy.searchsorted(bounds[:, 1], offset[chosen], side="right")
            within = batch[chosen] * self._share[slots] + offset[chosen] - bounds[slots, 0]
            windows = within // self._window
            (places,) = numpy.nonzero(chosen)
            # One group for each window of a slot; groups of a batch are adjacent.
            cuts = numpy.flatnonzero(numpy.diff(slots) | numpy.diff(windows)) + 1
            for group in numpy.split(numpy.arange(len(places)), cuts) if len(places) else ():
                slot, window = int(slots[group[0]]), int(windows[group[0]])
                self._draw(slot, window, within[group] - window * self._window, draws, places[group])
        return draws

    def _draw(self, slot: int, window: int, offsets: Indices, draws: Draws, places: Indices) -> None:
        """Write the samples at offsets in a window of a slot to places of `draws`."""
        size = self._size_of(slot, window)
        ordered = self._permutation(slot, window)[offsets]
        begin = 0
        for number, count in enumerate(self._quotas(size)):
            (chosen,) = numpy.nonzero((ordered >= begin) & (ordered < begin + count))
            if len(chosen):
                drawn = ordered[chosen] - begin + window * self._quotas(self._window)[number]
                self._read(number, slot, drawn, draws, places[chosen])
            begin += count

    def _read(self, number: int, slot: int, drawn: Indices, draws: Draws, places: Indices) -> None:
        """Write the samples of a source, by their number of earlier draws of the slot in this epoch, to `draws`."""
        start, length = self._ranges[number][slot]
        first_pass, before = divmod(self._epoch * self._drawn(number, slot), length)
        passes, within = numpy.divmod(drawn + before, length)
        for count in numpy.unique(passes):
            chosen = passes == count
            sequence = self._sequence(number, first_pass + int(count))
            draws.indices[places[chosen]] = sequence.samples(start + within[chosen])
        draws.repeats[places] = passes + (first_pass - self._first_passes[number])

    def files_ahead(self, positions: slice, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the files of the windows of a batch, then those of the next windows with one more file, for slots."""
        batch = positions.start // self._batch_size
        result: dict[int, None] = {}
        for ahead in (0, 1):
            for slot in slots:
                window = batch * int(self._share[slot]) // self._window + ahead
                counts = self._quotas(max(0, self._size_of(slot, window)))
                for number, quota in enumerate(self._quotas(self._window)):
                    files = self._files(number, slot, window * quota, counts[number], more=ahead)
                    result.update(dict.fromkeys(files))
        return tuple(result)

    def _files(self, number: int, slot: int, drawn: int, count: int, *, more: int) -> list[int]:
        """Return the files of `count` draws of a source from a number of earlier draws, and `more` files after them."""
        if count <= 0:  # the range of a slot without draws can be empty
            return []
        start, length = self._ranges[number][slot]
        passed, within = divmod(self._epoch * self._drawn(number, slot) + drawn, length)
        files = []
        while count > 0:
            end = min(within + count, length)
            files += self._sequence(number, passed).files(start + within, start + end, more if end < length else 0)
            count, passed, within = count - (end - within), passed + 1, 0
        return files

    def _size_of(self, slot: int, window: int) -> int:
        """Return the number of positions in a window, which is smaller at the end of an epoch."""
        return min(self._window, self._slot_ends[slot + 1] - self._slot_ends[slot] - window * self._window)

    def _drawn(self, number: int, slot: int) -> int:
        """Return how many samples of a source a slot draws in an epoch."""
        windows, rest = divmod(self._slot_ends[slot + 1] - self._slot_ends[slot], self._window)
        return windows * self._quotas(self._window)[number] + self._quotas(rest)[number]

    def _quotas(self, size: int) -> tuple[int, ...]:
        return quotas(size, tuple(part.weight for part in self._parts))

    def _first_pass(self, number: int) -> int:
        """Return the smallest pass over a source in this epoch; 0 for an empty source."""
        ranges = enumerate(self._ranges[number])
        passes = (self._epoch * self._drawn(number, slot) // length for slot, (_, length) in ranges if length)
        return min(passes, default=0)

    def _ranges_of(self, part: Part) -> list[tuple[int, int]]:
        """Return start and length of the range of each slot in the sequence of a source."""
        ends = [part.samples * end // max(1, self._samples) for end in self._slot_ends]
        return [(start, end - start) for start, end in pairwise(ends)]

    def _new_permutation(self, slot: int, window: int) -> Indices:
        return random_order(self._size_of(slot, window), derive_seed("window", self._seed, self._epoch, slot, window))

    def _new_sequence(self, number: int, passed: int) -> _FileSequence:
        return _FileSequence(self._parts[number], derive_seed("files", self._seed, number, passed))

    def _require_samples(self) -> None:
        for number, part in enumerate(self._parts):
            slots = range(len(self._share))
            if any(self._drawn(number, slot) and not self._ranges[number][slot][1] for slot in slots):
                raise InputError(
                    f"the source {part.name!r} has {part.samples} samples for {len(self._share)} microbatches",
                    expected="at least one sample of each source for every microbatch",
                    fix="add samples to the source, or leave it out",
                    code="E_MIXTURE",
                )
            if not self._quotas(self._window)[number]:
                raise InputError(
                    f"the source {part.name!r} with weight {part.weight} has no sample in a window of {self._window}",
                    expected="a weight for at least one sample of each window",
                    fix="a larger window, or a larger weight",
                    code="E_MIXTURE",
                )


class _FileSequence:
    """Samples of a source in the order of one pass: all samples of one file after another."""

    def __init__(self, part: Part, seed: int) -> None:
        self._files = random_order(len(part.sizes), seed)
        self._ends = numpy.cumsum(part.sizes[self._files])
        starts = part.first_sample + numpy.cumsum(part.sizes) - part.sizes
        # Added to a position in the sequence, gives the index of the dataset.
        self._shifts = starts[self._files] - (self._ends - part.sizes[self._files])
        self._first_file = part.first_file

    def samples(self, positions: Indices) -> Indices:
        """Return the indices of the dataset at positions of the sequence."""
        return positions + self._shifts[numpy.searchsorted(self._ends, positions, side="right")]

    def files(self, start: int, stop: int, more: int) -> list[int]:
        """Return the files from a position of the sequence to another, and `more` files after them."""
        places = _files_between(self._ends, start, stop, more)
        return [self._first_file + int(self._files[place]) for place in places]


def _files_between(ends: Indices, start: int, stop: int, more: int = 1) -> tuple[int, ...]:
    """Return the places of non-empty files with samples from `start` to `stop`, and of `more` files after them."""
    first, last = numpy.searchsorted(ends, [start, stop - 1], side="right")
    places = range(first, min(last + 1, len(ends)))
    later = range(last + 1, len(ends))
    filled = [place for place in places if ends[place] > (ends[place - 1] if place else 0)]
    return (*filled, *later[:more])
