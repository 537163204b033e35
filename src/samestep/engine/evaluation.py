"""Evaluation that counts every sample once, with the same result on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from samestep.data.batch import GlobalBatch, Shard
from samestep.data.transfer import beside_of
from samestep.engine.forward import Forward
from samestep.engine.loss import Loss
from samestep.engine.tally import rounded_sum
from samestep.metrics import LossMetric
from samestep.runtime.random_state import preserved_generators
from samestep.runtime.world import World


class Metric(Protocol):
    """A number over a dataset that is computed shard by shard."""

    name: str

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one shard: what the model returned for it, and its targets."""

    def compute(self, world: World) -> float:
        """The value over what all ranks counted; the counts start anew."""

    def reset(self) -> None:
        """Forget what was counted."""


class ShardOutputs(Protocol):
    """What computes the shards of this rank in evaluation.

    Attributes:
        counted: the ranks that together give every shard once.
    """

    counted: World

    def __call__(self, batch: GlobalBatch, position: int) -> Iterable[tuple[Shard, Any, list[Loss]]]:
        """Each shard that this rank gives, what the model returned for it and the loss of each part."""


class _OneByOne:
    def __init__(self, model: torch.nn.Module, forward: Forward, world: World) -> None:
        self.counted, self._model, self._forward = world.data, model, forward

    def __call__(self, batch: GlobalBatch, position: int) -> Iterator[tuple[Shard, Any, list[Loss]]]:
        for part in batch.parts:
            yield part, *self._forward.parts(self._model, part, "evaluation", position)
        for filler in batch.fillers:
            self._forward.parts(self._model, filler, "evaluation", position)


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[GlobalBatch],
    metrics: Sequence[Metric],
    forward: Forward,
    world: World,
    *,
    give_up: bool,
    outputs: ShardOutputs | None = None,
) -> dict[str, float] | None:
    """`loss`, each part of a loss that has several, `samples` and every metric over `batches`.

    Losses are gathered shard by shard and summed with one rounding, so the result has the same bits on every
    number of ranks. No shard is padded; a rank without samples in a batch just waits for the sum at the end.

    Args:
        world: all ranks; those of `world.data` divide the samples.
        give_up: a rank that is asked to end leaves off after the batch it is in, and so do all in the end.
        outputs: what computes shards; None for `model` itself, one after another.

    Returns:
        None if a rank left off.

    Raises:
        RunError: the loss counts nothing.
    """
    compute = outputs or _OneByOne(model, forward, world)
    whole, world = world, compute.counted
    found: list[tuple[int, list[float]]] = []
    slots = 0
    left_off = False
    model.eval()
    with torch.no_grad(), preserved_generators(world.device):
        for position, batch in enumerate(batches):
            if give_up and _leaves_off(whole):
                left_off = True
                break
            world.pulse.tick()
            for part, found_outputs, losses in compute(batch, position):
                numbers = [float(number) for loss in losses for number in (loss.sum, loss.count)]
                found.append((slots + part.number, [*numbers, part.size]))
                for metric in metrics if part.size else ():
                    metric.update(beside_of(found_outputs, part.data[1]), part.data[1])
            slots += batch.shards
    if give_up and _any(left_off, whole):
        for metric in metrics:
            metric.reset()
        return None
    gathered = torch.zeros(2 * forward.part_count + 1, slots, dtype=torch.float64, device=world.device)
    for slot, numbers in found:
        gathered[:, slot] = torch.tensor(numbers, dtype=torch.float64)
    world.all_reduce(gathered)  # every slot has one summand that is not zero, so no order matters
    *totals, samples = (rounded_sum(row) for row in gathered.tolist())
    values = forward.values(list(zip(totals[::2], totals[1::2], strict=True))) | {"samples": int(samples)}
    for metric in metrics:
        if isinstance(metric, LossMetric):
            metric.take(values["loss"])
    return values | {metric.name: metric.compute(world) for metric in metrics}


def _leaves_off(world: World) -> bool:
    """Whether this rank does so before the next batch; where ranks compute it together, they do so together."""
    return _any(world.stop_requested, world) if world.layout.is_split else world.stop_requested


def _any(mine: bool, world: World) -> bool:
    """Whether any rank says so."""
    said = torch.tensor([float(mine)], device=world.device)
    world.all_reduce(said)
    return bool(said > 0)
