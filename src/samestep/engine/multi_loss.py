"""Losses of several terms with different counts, such as tokens and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch

from samestep.data.batch import GlobalBatch
from samestep.distributed.world import World
from samestep.engine.loss import Loss, StepLoss, require_scalar
from samestep.errors import InputError
from samestep.metrics.counts import rounded_sum

Count = Literal["samples", "once"] | Callable[[Any], torch.Tensor | float]
_term_error = partial(InputError, code="E_LOSS")


@dataclass(frozen=True)
class LossTerm:
    """One term of a `MultiLoss`.

    Attributes:
        name: evaluation reports the term as `loss_NAME`.
        function: from outputs and targets of a microbatch to a scalar, the sum over the counted items.
        count: from the targets of a microbatch to the number of counted items; or `samples`; or `once` for a term that
            is not a sum over samples (a penalty on weights): `function` returns the whole term, and each microbatch
            adds its share.
        weight: factor of the term's mean.
    """

    name: str
    function: Callable[[Any, Any], torch.Tensor]
    count: Count = "samples"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise _term_error(f"the name of a loss term is {self.name!r}", "letters, digits and _", "name='tokens'")
        if not callable(self.count) and self.count not in ("samples", "once"):
            raise _term_error(
                f"loss term {self.name}: count is {self.count!r}",
                "samples, once, or a function of a microbatch's targets",
                "count=lambda targets: (targets != -100).sum()",
            )
        if not math.isfinite(self.weight):
            raise _term_error(f"loss term {self.name}: weight is {self.weight}", "a finite number", "weight=1.0")

    def items(self, targets: Any, samples: int) -> torch.Tensor | float:
        """Return the number of counted items of a microbatch."""
        return self.count(targets) if callable(self.count) else samples

    def loss(self, outputs: Any, targets: Any, samples: int) -> Loss:
        """Return sum and count of one microbatch.

        Raises:
            InputError: the function did not return a scalar tensor.
        """
        advice = "return a scalar tensor, the sum over the counted items (of a samestep.Loss, its .sum)"
        total = require_scalar(self.function(outputs, targets), f"loss term {self.name}", advice).reshape(())
        return Loss(total * samples if self.count == "once" else total, self.items(targets, samples))

    def require_valid(self, count: float, place: str) -> None:
        """Refuse a count that is negative or not finite."""
        if not 0 <= count < math.inf:
            raise _term_error(
                f"loss term {self.name} counted {count} in {place}",
                "a finite count of at least 0",
                f"check the count function of the term and the targets of {place}",
            )


class MultiLoss(StepLoss):
    """Weighted sum of terms, each with its own count; the `loss` argument of `samestep.Engine`.

    The loss of a global batch is the sum over terms of `weight * sum / count`, with sum and count over the whole batch.
    Terms with different counts have no common divisor that could be applied after the backward. The counts depend on
    the targets alone, so they are summed over ranks before the first forward.

    Attributes:
        terms: the terms, in order.
    """

    def __init__(self, terms: Iterable[LossTerm]) -> None:
        self.terms = tuple(terms)
        names = [term.name for term in self.terms]
        if not names or len(set(names)) < len(names):
            raise _term_error(
                f"the names of loss terms are {', '.join(names) or '(none)'}",
                "at least one term, and different names",
                "MultiLoss([LossTerm('tokens', ...), LossTerm('length', ...)])",
            )

    @property
    def term_count(self) -> int:
        return len(self.terms)

    def __call__(self, outputs: Any, targets: Any) -> NoReturn:
        """Raise `TypeError`: the counts of the global batch are not known to one microbatch."""
        raise TypeError("a MultiLoss cannot be called inside another loss; pass it to samestep.Engine")

    def global_counts(self, batch: GlobalBatch, world: World) -> list[float]:
        """Return the count of each term in the global batch.

        Raises:
            InputError: a count is negative or not finite.
        """
        counts = torch.zeros(len(self.terms), batch.microbatches, dtype=torch.float64, device=world.device)
        for microbatch in batch.local_microbatches:
            for row, term in enumerate(self.terms if microbatch.size else ()):
                count, items = counts[row, microbatch.number], term.items(microbatch.pair[1], microbatch.size)
                # The assignment of a number to an element would wait for the device.
                count.copy_(items.reshape(())) if isinstance(items, torch.Tensor) else count.fill_(items)
        world.all_reduce(counts)  # each element has one non-zero summand, so the order of summation is irrelevant
        rows = counts.tolist()
        for term, row in zip(self.terms, rows, strict=True):
            for number, count in enumerate(row):
                term.require_valid(count, f"microbatch {number}")
        return [rounded_sum(row) for row in rows]

    def term_losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        return [term.loss(outputs, targets, samples) for term in self.terms]

    def combine(self, losses: Sequence[Loss], counts: Sequence[float], batch_size: int, samples: int) -> Loss:
        """Return a microbatch's share of the loss, as a sum over samples that the step divides by the batch size.

        A term without counted items in the whole batch adds nothing, and its gradient is zero.
        """
        shares = [
            loss.sum * (term.weight * batch_size / count if count else 0.0)
            for term, loss, count in zip(self.terms, losses, counts, strict=True)
        ]
        return Loss(sum(shares[1:], start=shares[0]), samples)

    def combine_whole(self, losses: Sequence[Loss], samples: int) -> Loss:
        counts = [float(loss.count) for loss in losses]
        for term, count in zip(self.terms, counts, strict=True):
            term.require_valid(count, "the global batch")
        return self.combine(losses, counts, samples, samples)

    def means(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        means = [total / count if count else math.nan for total, count in sums]
        weighted = [term.weight * mean for term, mean, (_, count) in zip(self.terms, means, sums, strict=True) if count]
        return {"loss": rounded_sum(weighted)} | {
            f"loss_{term.name}": mean for term, mean in zip(self.terms, means, strict=True)
        }
