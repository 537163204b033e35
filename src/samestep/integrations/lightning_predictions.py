"""Loader of Samestep for predictions of Lightning, with the indices that `BasePredictionWriter` receives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from samestep.data.loader import Loader
from samestep.integrations.lightning_data import SamestepBatch, SamestepDataLoader


class _SeenIndices(_IndexBatchSamplerWrapper):
    """Indices of the global batches so far; Lightning reads those of a batch sampler of this type alone."""

    def __init__(self) -> None:
        # Without that of the base class: there is no batch sampler to iterate.
        self.seen_batch_indices: list[list[int]] = []


class PredictionDataLoader(SamestepDataLoader):
    """Loader that notes the indices of each global batch, over all ranks.

    Args:
        loader: the loader.
        original: the loader of torch.
    """

    def __init__(self, loader: Loader, original: DataLoader[Any]) -> None:
        super().__init__(loader, original, is_training=False)
        self.batch_sampler = _SeenIndices()

    def __iter__(self) -> Iterator[SamestepBatch]:
        seen = self.batch_sampler.seen_batch_indices = []
        for batch in super().__iter__():
            seen.append([int(index) for index in batch.global_batch.indices])
            yield batch
