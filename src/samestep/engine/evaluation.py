"""Evaluation that counts every sample once, with the same result on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from samestep.data.batch import GlobalBatch, Microbatch, move_next_to
from samestep.distributed.rng import preserved_generators
from samestep.distributed.world import World
from samestep.engine.loss import Loss
from samestep.engine.microbatch import EVALUATION, MicrobatchForward
from samestep.engine.step_stats import rounded_sum
from samestep.errors import RunError
from samestep.metrics.metrics import LossMetric, Metric


class EvaluationOutputs:
    """Computes the microbatches of this rank in an evaluation, one after another.

    Attributes:
        world: the ranks that together return every microbatch once.
    """

    def __init__(self, model: torch.nn.Module, forward: MicrobatchForward, world: World) -> None:
        self.world, self.forward, self._model = world, forward, model

    def __call__(self, batch: GlobalBatch, position: int) -> Iterator[tuple[Microbatch, Any, list[Loss]]]:
        """Yield microbatches with outputs and the loss of each term."""
        for microbatch in batch.local_microbatches:
            yield microbatch, *self.forward.term_losses(self._model, microbatch, EVALUATION, position)
        for filler in batch.fillers:
            self.forward.term_losses(self._model, filler, EVALUATION, position)


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[GlobalBatch],
    metrics: Sequence[Metric | LossMetric],
    compute: EvaluationOutputs,
    all_ranks: World,
    *,
    until_stop: bool,
) -> dict[str, float] | None:
    """Return `loss`, the mean of each of several terms, `samples` and every metric over `batches`.

    Losses are gathered per microbatch and summed with one rounding, so the result has the same bits on every number of
    ranks. No microbatch is padded. With `until_stop`, the evaluation ends early with None on every rank if a rank
    receives a stop request.

    Raises:
        RunError: the loss counts nothing.
    """
    world, loss = compute.world, compute.forward.loss
    counting = [metric for metric in metrics if not isinstance(metric, LossMetric)]
    rows: list[tuple[int, list[float]]] = []  # slot; sum and count of each term, samples
    slots = 0
    stopped = False
    model.eval()
    with torch.no_grad(), preserved_generators(world.device):
        for position, batch in enumerate(batches):
            if until_stop and _stops_before_batch(all_ranks):
                stopped = True
                break
            world.context.status.heartbeat()
            for microbatch, outputs, losses in compute(batch, position):
                numbers = [float(number) for term in losses for number in (term.sum, term.count)]
                rows.append((slots + microbatch.number, [*numbers, microbatch.size]))
                targets = microbatch.data[1]
                for metric in counting if microbatch.size else ():
                    metric.update(move_next_to(outputs, targets), targets)
            slots += batch.microbatches
    if until_stop and _any_rank(stopped, all_ranks):
        for metric in counting:
            metric.reset()
        return None
    gathered = torch.zeros(2 * loss.term_count + 1, slots, dtype=torch.float64, device=world.device)
    for slot, numbers in rows:
        gathered[:, slot] = torch.tensor(numbers, dtype=torch.float64)
    world.all_reduce(gathered)  # each element has one non-zero summand, so the order of summation is irrelevant
    *totals, samples = (rounded_sum(row) for row in gathered.tolist())
    if not any(totals[1::2]):
        raise RunError(
            "the loss counted nothing in evaluation", fix="check for ignored targets", code="E_NOTHING_COUNTED"
        )
    values = loss.means(list(zip(totals[::2], totals[1::2], strict=True))) | {"samples": int(samples)}
    return values | {
        metric.name: metric.function(values["loss"]) if isinstance(metric, LossMetric) else metric.compute(world)
        for metric in metrics
    }


def _stops_before_batch(world: World) -> bool:
    """Return whether this rank stops; ranks that compute a batch together stop together."""
    return _any_rank(world.stop_requested, world) if world.mesh_shape.splits_model else world.stop_requested


def _any_rank(flag: bool, world: World) -> bool:
    """Return whether `flag` is set on any rank; a collective."""
    total = torch.tensor([float(flag)], device=world.device)
    world.all_reduce(total)
    return bool(total > 0)
