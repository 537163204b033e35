"""A loss function as a loss of one part, so that a forward knows one kind of loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.loss import Loss, LossFunction, as_loss
from samestep.engine.multi_loss import MultiLoss
from samestep.runtime.world import World


class PlainLoss:
    """What `MultiLoss` is for several parts; its count need not be known before the forward."""

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        self.parts = (self,)

    def loss_of(self, outputs: Any, targets: Any, samples: int) -> Loss:
        """Sum and count of one shard."""
        return as_loss(self._function(outputs, targets), samples)

    def losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        """The one loss of one shard."""
        return [self.loss_of(outputs, targets, samples)]

    def totals(self, batch: GlobalBatch, targets_of: Callable[[Shard], Any], world: World) -> list[float]:
        """Nothing: the count comes with the loss."""
        return []

    def joined(self, losses: Sequence[Loss], totals: Sequence[float], batch_size: int, samples: int) -> Loss:
        """The one loss."""
        return losses[0]

    def values(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        """`loss` from the sum and count of a whole dataset."""
        ((total, count),) = sums
        return {"loss": total / count}


def in_parts(loss: LossFunction | MultiLoss) -> PlainLoss | MultiLoss:
    """The loss that an engine was given, as one of parts."""
    return loss if isinstance(loss, MultiLoss) else PlainLoss(loss)
