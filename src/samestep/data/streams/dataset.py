"""Dataset of samples in sharded files, and its order: each microbatch draws from its own range of the files."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy

from samestep.data.order import DatasetOrder, Indices, Order, random_order
from samestep.data.streams.source import FileSource
from samestep.distributed.rng import derive_seed
from samestep.errors import DataError, InputError
from samestep.microbatches import microbatch_bounds

DEFAULT_WINDOW = 4096


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


class SlotOrder:
    """Order in which slot s, which is microbatch s of every global batch, draws from range s of the permuted files.

    1. A random permutation of (seed, epoch) orders the files. The samples in this order are divided
       into one range per slot, as long as the samples of the slot in an epoch.
    2. The samples of a slot in an epoch are divided into windows of `window` positions. A random
       permutation of (seed, epoch, slot, window) orders the positions.

    Each sample occurs once. The memory is proportional to the files and to the windows of all
    slots. The time of a slice does not depend on its position.

    Args:
        file_sizes: number of samples in each file.
        sizes: division of global batches.
        window: positions of a window, at least 1.
        seed: seed of the order.
        epoch: number of the epoch.
    """

    def __init__(
        self, file_sizes: Indices, sizes: BatchSizes, *, window: int, seed: int, epoch: int
    ) -> None:
        self._samples = int(file_sizes.sum())
        self._batch_size = sizes.batch_size
        self._window = window
        self._seed = seed
        self._epoch = epoch
        bounds = microbatch_bounds(sizes.batch_size, sizes.microbatches)
        last = microbatch_bounds(self._samples % sizes.batch_size, sizes.last_microbatches)
        last += [(last[-1][1], last[-1][1])] * (sizes.microbatches - len(last))
        self._bounds = numpy.array(bounds)
        self._last_bounds = numpy.array(last)
        self._share = self._bounds[:, 1] - self._bounds[:, 0]
        self._complete = self._samples // sizes.batch_size
        slot_sizes = (
            self._complete * self._share + self._last_bounds[:, 1] - self._last_bounds[:, 0]
        )
        self._slot_ends = [0, *numpy.cumsum(slot_sizes).tolist()]
        self._permutation = lru_cache(2 * sizes.microbatches)(self._new_permutation)

        # Zero is the number of the only source.
        files = random_order(len(file_sizes), derive_seed("files", seed, 0, epoch))
        self._ends = numpy.cumsum(file_sizes[files])
        starts = numpy.cumsum(file_sizes) - file_sizes
        # Added to a position among the permuted files, gives the index of the dataset.
        self._shifts = starts[files] - (self._ends - file_sizes[files])

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, positions: slice, /) -> Indices:
        at = numpy.arange(*positions.indices(self._samples), dtype=numpy.int64)
        batch, offset = numpy.divmod(at, self._batch_size)
        places = numpy.empty_like(at)  # among the permuted files
        for bounds, chosen in (
            (self._bounds, batch < self._complete),
            (self._last_bounds, batch >= self._complete),
        ):
            slots = numpy.searchsorted(bounds[:, 1], offset[chosen], side="right")
            within = batch[chosen] * self._share[slots] + offset[chosen] - bounds[slots, 0]
            places[chosen] = self._places(slots, within)
        return places + self._shifts[numpy.searchsorted(self._ends, places, side="right")]

    def _places(self, slots: Indices, within: Indices) -> Indices:
        """Return the places among the permuted files, for positions within the samples of slots."""
        places = numpy.empty_like(within)
        windows = within // self._window
        # One group for each window of a slot; groups of a batch are adjacent.
        cuts = numpy.flatnonzero(numpy.diff(slots) | numpy.diff(windows)) + 1
        for group in numpy.split(numpy.arange(len(slots)), cuts):
            if len(group):
                slot = int(slots[group[0]])
                window = int(windows[group[0]])
                begin = window * self._window
                order = self._permutation(slot, window)
                places[group] = self._slot_ends[slot] + begin + order[within[group] - begin]
        return places

    def _new_permutation(self, slot: int, window: int) -> Indices:
        """Return the order of the positions in a window, which is smaller at the end of an epoch."""
        rest = self._slot_ends[slot + 1] - self._slot_ends[slot] - window * self._window
        seed = derive_seed("window", self._seed, self._epoch, slot, window)
        return random_order(min(self._window, rest), seed)


class StreamDataset:
    """Map-style dataset of the samples in the files of a source, for data that do not fit on a disk or into memory.

    With `samestep.loader(dataset, shuffle=True, ...)`, the order is a `SlotOrder`: a rank reads
    only files of its own microbatches. Without `shuffle`, it is that of the files. With an explicit
    `order`, or a dataset that wraps this one, it is that of other datasets.

    Attributes:
        source: the source.
        window: positions of a window.
        fingerprint: fingerprint of the source.

    Args:
        source: the files.
        window: number of samples of a slot that are in random order together; a larger window is
            closer to a uniform random order, and has more open files.
        transform: function from a sample of the source to a sample of the dataset. It may draw
            random numbers from the generators of Python, NumPy and torch, which are seeded for each
            sample.

    Raises:
        InputError: the window is not positive.
        DataError: the source has no samples.
    """

    def __init__(
        self,
        source: FileSource,
        *,
        window: int = DEFAULT_WINDOW,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if window < 1:
            raise InputError(
                f"the window of a stream is {window}",
                "window >= 1",
                f"window={DEFAULT_WINDOW}",
                code="E_VALUE",
            )
        self.source = source
        self.window = window
        self.fingerprint = source.fingerprint
        self._transform = transform
        self._sizes = numpy.asarray(source.sizes, dtype=numpy.int64)
        self._ends = numpy.cumsum(self._sizes)
        if not self._sizes.any():
            raise DataError(
                "the files of a stream have no samples",
                expected="at least one file with a sample",
                fix="check the path",
                code="E_DATA",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a stream of {len(self)}")
        file = int(numpy.searchsorted(self._ends, index, side="right"))
        sample = self.source.read(file, index - int(self._ends[file] - self._sizes[file]))
        if self._transform is None:
            return sample
        return self._transform(sample)

    def settings(self, *, shuffle: bool) -> dict[str, int | str]:
        """Return the settings on which the order depends, for checkpoints."""
        settings: dict[str, int | str] = {"files": self.fingerprint}
        if shuffle:
            settings |= {"order": "slots", "window": self.window}
        return settings

    def order(self, sizes: BatchSizes, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Return the order of an epoch."""
        if not shuffle:
            return DatasetOrder(len(self))
        return SlotOrder(self._sizes, sizes, window=self.window, seed=seed, epoch=epoch)
