"""Evaluation that counts every sample once, with the same result on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from samestep.data.batch import GlobalBatch
from samestep.engine.forward import Forward
from samestep.engine.tally import rounded_sum
from samestep.errors import RunError
from samestep.runtime.random_state import preserved_generators
from samestep.runtime.world import World


class Metric(Protocol):
    """A number over a dataset that is computed shard by shard."""

    name: str

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Count one shard."""

    def compute(self, world: World) -> float:
        """The value over what all ranks counted."""


def evaluate(
    model: torch.nn.Module, batches: Iterable[GlobalBatch], metrics: Sequence[Metric], forward: Forward, world: World
) -> dict[str, float]:
    """`loss`, `samples` and every metric over `batches`.

    Losses are gathered shard by shard and summed with one rounding, so the result has the same bits on every
    number of ranks. No shard is padded; a rank without samples in a batch just waits for the sum at the end.

    Raises:
        RunError: the loss counts nothing.
    """
    sums: list[tuple[int, float, float, int]] = []
    slots = 0
    model.eval()
    with torch.no_grad(), preserved_generators(world.device):
        for position, batch in enumerate(batches):
            for part in batch.parts:
                outputs, loss = forward(model, part, "evaluation", position)
                sums.append((slots + part.number, float(loss.sum), float(loss.count), part.size))
                for metric in metrics:
                    metric.update(outputs, part.data[1])
            slots += batch.shards
    gathered = torch.zeros(3, slots, dtype=torch.float64, device=world.device)
    for slot, total, count, size in sums:
        gathered[:, slot] = torch.tensor([total, count, size], dtype=torch.float64)
    world.all_reduce(gathered)  # every slot has one summand that is not zero, so no order matters
    losses, counts, sizes = (rounded_sum(row) for row in gathered.tolist())
    if counts == 0:
        raise RunError("the loss counted nothing in evaluation", do="look at ignored targets")
    values = {"loss": losses / counts, "samples": int(sizes)}
    return values | {metric.name: metric.compute(world) for metric in metrics}
