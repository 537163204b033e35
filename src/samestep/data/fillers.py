"""Fillers: microbatches without a share in the result, for ranks with fewer microbatches than others.

Strategies that communicate in every forward and backward, such as `fsdp`, need equally many of them on each rank.
"""

from __future__ import annotations

from samestep.data.microbatch_dataset import MicrobatchRequest
from samestep.data.permutation import Indices


def fillers(number: int, epoch: int, batch: Indices, repeats: Indices) -> list[MicrobatchRequest]:
    """Return requests of `number` fillers, with the first samples of the global batch.

    They have two samples if possible, because batch norm cannot train on one.
    """
    return [MicrobatchRequest(epoch, 0, batch[:2], repeats[:2], is_filler=True)] * number
