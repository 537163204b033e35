"""Metrics from integer counts: accuracy, and Dice and intersection over union from a confusion matrix.

The sum of integers over batches is exact in any order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch

from samestep.distributed.device_reads import device_reads
from samestep.errors import InputError

MAX_CLASSES = 5_000  # of a confusion matrix
Score = Literal["dice", "iou"]


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
        self.name = name
        self.classes = classes
        self.ignore_index = ignore_index
        self.counts: torch.Tensor | None = None  # int64; None before the first batch

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one batch.

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
                    fix="set metrics: [] in the recipe",
                    code="E_METRIC",
                )
        channels = outputs.shape[1] if outputs.dim() > 1 else 1
        expected = outputs.shape if channels == 1 else (*outputs.shape[:1], *outputs.shape[2:])
        if channels != (self.classes or channels) or targets.shape != expected:
            raise InputError(
                f"metric {self.name} received outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}"
                + (f" for {self.classes} classes" if self.classes else ""),
                expected="outputs (N, C, ...) and class numbers (N, ...); for one class, binary targets (N, 1, ...)",
                fix="check model.options.num_classes and data.options.classes",
                code="E_METRIC",
            )
        with device_reads.waiting(outputs.device):  # for the number of counted targets
            counts = self.count(outputs, targets, targets != self.ignore_index, channels)
        self.counts = counts if self.counts is None else self.counts + counts

    def compute(self) -> float:
        """Return the value over all counts, NaN without any, and reset the counts."""
        counts = self.counts
        self.reset()
        if counts is None:
            return math.nan
        return self.value(device_reads.copy(counts))

    def reset(self) -> None:
        """Reset the counts."""
        self.counts = None

    @abstractmethod
    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        """Return the counts of one batch: an int64 tensor of one or two dimensions."""

    @abstractmethod
    def value(self, counts: torch.Tensor) -> float:
        """Return the metric of summed counts."""


class Accuracy(CountMetric):
    """Share of the targets that are among the `top_k` largest logits; 0 without targets."""

    def __init__(
        self,
        name: str = "accuracy",
        classes: int | None = None,
        ignore_index: int = -100,
        *,
        top_k: int = 1,
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


class ConfusionMatrix(CountMetric):
    """Counts `[target, prediction]`, as a vector of four counts for one output channel; 0 is then the background."""

    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        if channels > MAX_CLASSES:
            raise InputError(
                f"the {self.name} metric does not support {channels:,} classes",
                expected=f"at most {MAX_CLASSES:,} classes, because pairs of classes are counted",
                fix="use another metric",
                code="E_METRIC",
            )
        size = max(2, channels)
        predictions = outputs > 0 if channels == 1 else outputs.argmax(dim=1)
        counted = targets[is_counted].long()
        outside = counted[(counted < 0) | (counted >= size)]
        if len(outside):
            raise InputError(
                f"metric {self.name} received the target {int(outside[0])}",
                expected=f"targets from 0 to {size - 1}, or the ignored value {self.ignore_index}",
                fix="check model.options.num_classes and the masks, or set loss.options.ignore_index",
                code="E_METRIC",
            )
        # Integers: the sum is independent of the order on every device.
        counts = torch.bincount(counted * size + predictions[is_counted].long(), minlength=size**2)
        if channels == 1:
            return counts
        return counts.view(size, size)


class OverlapMetric(ConfusionMatrix):
    """Dice (F1) or intersection over union of all pixels, voxels or samples together.

    With one output channel, the score of that class. With several, the mean over the classes that
    occur in targets or predictions, including the background; 1 if none occurs.
    """

    def __init__(
        self,
        name: str | None = None,
        classes: int | None = None,
        ignore_index: int = -100,
        *,
        score: Score = "iou",
    ) -> None:
        super().__init__(name or score, classes, ignore_index)
        self._score = score

    def value(self, counts: torch.Tensor) -> float:
        matrix = (counts.view(2, 2) if counts.dim() == 1 else counts).double()
        both = matrix.diagonal()
        sizes = matrix.sum(dim=0) + matrix.sum(dim=1)
        if counts.dim() == 1:
            both = both[1:]
            sizes = sizes[1:]
        occurs = sizes > 0
        if not occurs.any():
            return 1.0
        scores = 2 * both / sizes if self._score == "dice" else both / (sizes - both)
        return float(scores[occurs].mean())
