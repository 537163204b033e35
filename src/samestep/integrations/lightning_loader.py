"""Loaders and batches of Samestep as Lightning uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.integrations.torch_loader import position_of, restore_position
from samestep.microbatches import Cursor


class SamestepBatch:
    """Batch of Lightning: a global batch with the microbatches of this rank, which hooks receive in place of tensors.

    Attributes:
        global_batch: the batch.
    """

    def __init__(self, global_batch: GlobalBatch) -> None:
        self.global_batch = global_batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield a tensor without memory, in which Lightning finds the size of the batch for values of hooks."""
        yield torch.empty(self.global_batch.size, device="meta")


class SamestepDataLoader:
    """Loader of Samestep as Lightning uses it, in place of a `DataLoader`.

    The state that Lightning saves is the position in the data, which does not depend on the number of processes.

    Attributes:
        dataset: the dataset, which callbacks of Lightning read.
    """

    def __init__(self, loader: Loader, original: DataLoader[Any], *, is_training: bool) -> None:
        self.loader, self.original, self._is_training = loader, original, is_training
        self.dataset = original.dataset
        self.sampler = self  # Lightning calls `sampler.set_epoch`
        self.batch_sampler: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[SamestepBatch]:
        # At the first batch, not earlier: Lightning sets the epoch after it has created the iterator.
        yield from map(SamestepBatch, self.loader if self._is_training else self.loader.complete_epoch())

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch, unless the position is in it."""
        if self.loader.cursor.epoch != epoch:
            self.loader.cursor = Cursor(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings on which batches depend."""
        return position_of(self.loader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        restore_position(self.loader, state)


class _SeenIndices(_IndexBatchSamplerWrapper):
    """Indices of the global batches so far; Lightning reads those of a batch sampler of this type alone."""

    def __init__(self) -> None:
        # Without that of the base class: there is no batch sampler to iterate.
        self.seen_batch_indices: list[list[int]] = []


class PredictionDataLoader(SamestepDataLoader):
    """Loader for predictions: notes the indices of each global batch for `BasePredictionWriter`."""

    def __init__(self, loader: Loader, original: DataLoader[Any]) -> None:
        super().__init__(loader, original, is_training=False)
        self.batch_sampler = _SeenIndices()

    def __iter__(self) -> Iterator[SamestepBatch]:
        seen = self.batch_sampler.seen_batch_indices = []
        for batch in super().__iter__():
            seen.append([int(index) for index in batch.global_batch.indices])
            yield batch
