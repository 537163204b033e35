"""Metrics from integer counts, whose sum over microbatches and ranks is exact in any order."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from samestep.distributed.world import World, gather_numbers
from samestep.errors import InputError


class CountMetric(ABC):
    """Metric of logits and class numbers, computed from integer counts.

    One output channel is binary: a positive logit is class 1.

    Args:
        name: key of the metric in the results of an evaluation.
        classes: required number of output channels; None for any number.
        ignore_index: targets of this value (padding) are not counted.

    Attributes:
        higher_is_better: direction of an improvement.
    """

    higher_is_better = True

    def __init__(self, name: str, classes: int | None = None, ignore_index: int = -100) -> None:
        self.name, self.classes, self.ignore_index = name, classes, ignore_index
        self.counts: torch.Tensor | None = None  # int64; None before the first microbatch

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one microbatch.

        Args:
            outputs: logits `(N, C)` or `(N, C, ...)`; of binary targets `(N, 1, ...)` or `(N)`.
            targets: class numbers `(N)` or `(N, ...)`; binary targets of the shape of the outputs.

        Raises:
            InputError: an argument is not a tensor, or the shapes do not match.
        """
        for argument, value in (("the model's outputs", outputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"metric {self.name} received {argument} as a {type(value).__name__}",
                    expected="a tensor of logits and a tensor of class numbers",
                    fix="set metrics: [] in the recipe; in your own loop, use a metric that selects its arguments",
                    code="E_METRIC",
                )
        channels = outputs.shape[1] if outputs.dim() > 1 else 1
        expected = outputs.shape if channels == 1 else (*outputs.shape[:1], *outputs.shape[2:])
        if channels != (self.classes or channels) or targets.shape != expected:
            raise InputError(
                f"metric {self.name} received outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}" + (f" for {self.classes} classes" if self.classes else ""),
                expected="outputs (N, C, ...) and class numbers (N, ...); for one class, binary targets (N, 1, ...)",
                fix="check model.options.num_classes and data.options.classes",
                code="E_METRIC",
            )
        counts = self.count(outputs, targets, targets != self.ignore_index, channels)
        self.counts = counts if self.counts is None else self.counts + counts

    def compute(self, world: World) -> float:
        """Return the value over the counts of all ranks, NaN without any, and reset the counts. A collective."""
        sizes = [] if self.counts is None else list(self.counts.shape)
        shape = max(gather_numbers(world, [*sizes, 0, 0][:2]))
        if not any(shape):
            return math.nan
        counts = self.counts
        if counts is None:
            counts = torch.zeros([size for size in shape if size], dtype=torch.int64, device=world.device)
        world.all_reduce(counts)
        self.reset()
        return self.value(counts)

    def reset(self) -> None:
        """Reset the counts."""
        self.counts = None

    def mark(self) -> Callable[[], None]:
        """Return a function that drops later updates."""
        return partial(setattr, self, "counts", self.counts)

    @abstractmethod
    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        """Return the counts of one microbatch: an int64 tensor of one or two dimensions."""

    @abstractmethod
    def value(self, counts: torch.Tensor) -> float:
        """Return the metric of summed counts."""


class Accuracy(CountMetric):
    """Share of the targets that are among the `top_k` largest logits; 0 without targets."""

    def __init__(
        self, name: str = "accuracy", classes: int | None = None, ignore_index: int = -100, *, top_k: int = 1
    ) -> None:
        super().__init__(name, classes, ignore_index)
        self._top_k = top_k

    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        if channels == 1:
            hits = (outputs > 0) == targets
        elif self._top_k == 1:
            hits = outputs.argmax(dim=1) == targets
        else:
            largest = outputs.topk(min(self._top_k, channels), dim=1).indices
            hits = (largest == targets.unsqueeze(1)).any(dim=1)
        return torch.stack([(hits & is_counted).sum(), is_counted.sum()])

    def value(self, counts: torch.Tensor) -> float:
        hits, count = counts.float()  # in float32, as in torchmetrics
        return float(hits / count.clamp(min=1))


def rounded_sum(values: list[float]) -> float:
    """Return the sum, rounded once, so in any order; the plain sum if `fsum` fails on infinities or overflow."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)
