"""A loss of several parts that count different things: tokens here, samples there.

What is wanted of a global batch is the sum over parts of `weight * (sum of the part) / (count of the part)`, both
taken over the whole batch. Parts that count differently have no common divisor that could be applied afterwards, so
the counts, which targets alone decide, are summed over ranks before the first forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.loss import Loss
from samestep.engine.tally import rounded_sum
from samestep.errors import InputError
from samestep.runtime.world import World

Count = Literal["samples", "once"] | Callable[[Any], torch.Tensor | float]


@dataclass(frozen=True)
class LossPart:
    """One part of a loss.

    Attributes:
        name: what evaluation calls it: `loss_NAME`.
        function: from a shard's outputs and targets to a scalar, the sum over what is counted.
        count: from a shard's targets to how many are counted; or `samples`; or `once`, for a term that is not a
            sum over samples (a penalty on weights): `function` returns the whole of it, and each shard adds its share.
        weight: factor of this part's mean.
    """

    name: str
    function: Callable[[Any, Any], torch.Tensor]
    count: Count = "samples"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InputError(f"a loss part is called {self.name!r}", rule="letters, digits and _", do="name='tokens'")
        if not callable(self.count) and self.count not in ("samples", "once"):
            raise InputError(
                f"loss part {self.name}: count is {self.count!r}",
                rule="samples, once, or a function of a shard's targets",
                do="count=lambda targets: (targets != -100).sum()",
            )
        if not math.isfinite(self.weight):
            raise InputError(f"loss part {self.name}: weight is {self.weight}", rule="a finite number", do="weight=1.0")

    def count_of(self, targets: Any, samples: int) -> torch.Tensor | float:
        """How many of what it counts there are in a shard."""
        return self.count(targets) if callable(self.count) else samples

    def loss_of(self, outputs: Any, targets: Any, samples: int) -> Loss:
        """Sum and count of one shard.

        Raises:
            TypeError: the function returned something else than a scalar.
        """
        value = self.function(outputs, targets)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TypeError(
                f"loss part {self.name} returned a {type(value).__name__}{shape}; "
                "return a scalar tensor, the sum over what it counts (of a samestep.Loss, its .sum)"
            )
        total = value.reshape(())
        return Loss(total * samples if self.count == "once" else total, self.count_of(targets, samples))


class MultiLoss:
    """A loss of parts, each summed and counted on its own; give it to `samestep.Engine` as it is.

    Attributes:
        parts: they add up, each with its weight.
    """

    def __init__(self, parts: Iterable[LossPart]) -> None:
        self.parts = tuple(parts)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise InputError(
                f"the parts of a loss are called {', '.join(names) or '(none given)'}",
                rule="at least one part, each with a name of its own",
                do="MultiLoss([LossPart('tokens', ...), LossPart('length', ...)])",
            )

    def __call__(self, outputs: Any, targets: Any) -> NoReturn:
        """Refused: one shard alone cannot know the counts of the global batch."""
        raise TypeError("a MultiLoss cannot be called inside another loss; give it to samestep.Engine as it is")

    def losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        """Sum and count of every part of one shard."""
        return [part.loss_of(outputs, targets, samples) for part in self.parts]

    def totals(self, batch: GlobalBatch, targets_of: Callable[[Shard], Any], world: World) -> list[float]:
        """The count of every part in the global batch; every rank calls it, also one without samples.

        Raises:
            InputError: a count is negative or not finite.
        """
        counts = torch.zeros(len(self.parts), batch.shards, dtype=torch.float64, device=world.device)
        for shard in batch.parts:
            if not shard.size:
                continue  # its targets only fill a place
            targets = targets_of(shard)
            for row, part in enumerate(self.parts):
                counts[row, shard.number] = part.count_of(targets, shard.size)
        world.all_reduce(counts)  # every slot has one summand that is not zero, so no order matters
        rows = counts.tolist()
        for part, row in zip(self.parts, rows, strict=True):
            bad = [shard for shard, count in enumerate(row) if not 0 <= count < math.inf]
            if bad:
                raise InputError(
                    f"loss part {part.name} counted {row[bad[0]]} in shard {bad[0]}",
                    rule="a count is finite and not negative",
                    do="look at the part's count function and at these targets",
                )
        return [rounded_sum(row) for row in rows]

    def joined(self, losses: Sequence[Loss], totals: Sequence[float], batch_size: int, samples: int) -> Loss:
        """A shard's share of the whole, as a sum over samples: what a step sums and divides by the batch's samples.

        A part that counts nothing in the whole batch adds nothing, and its gradient is zero.
        """
        shares = [
            loss.sum * (part.weight * batch_size / total if total else 0.0)
            for part, loss, total in zip(self.parts, losses, totals, strict=True)
        ]
        return Loss(sum(shares[1:], start=shares[0]), samples)

    def values(self, sums: Sequence[tuple[float, float]]) -> dict[str, float]:
        """`loss` and each part's mean from the sums and counts of a whole dataset."""
        means = [total / count if count else math.nan for total, count in sums]
        weighted = [part.weight * mean for part, mean, (_, count) in zip(self.parts, means, sums, strict=True) if count]
        return {"loss": rounded_sum(weighted)} | {
            f"loss_{part.name}": mean for part, mean in zip(self.parts, means, strict=True)
        }
