"""Dice and intersection over union from a confusion matrix."""

from __future__ import annotations

from typing import Literal

import torch

from samestep.errors import InputError
from samestep.metrics.counts import CountMetric

MAX_CLASSES = 5_000
Score = Literal["dice", "iou"]


class ConfusionMatrix(CountMetric):
    """Counts `[target, prediction]`, as a vector of four counts for one output channel; 0 is then the background.

    torchmetrics' confusion matrix needs gigabytes under deterministic algorithms (every pixel is compared with every
    pair of classes), and its binary scores guess from the values of a batch whether these are logits.
    """

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
        return counts if channels == 1 else counts.view(size, size)


class OverlapMetric(ConfusionMatrix):
    """Dice (F1) or intersection over union of all pixels, voxels or samples together.

    With one output channel, the score of that class. With several, the mean over the classes that occur in targets or
    predictions, including the background; 1 if none occurs.
    """

    def __init__(
        self, name: str | None = None, classes: int | None = None, ignore_index: int = -100, *, score: Score = "iou"
    ) -> None:
        super().__init__(name or score, classes, ignore_index)
        self._score = score

    def value(self, counts: torch.Tensor) -> float:
        matrix = (counts.view(2, 2) if counts.dim() == 1 else counts).double()
        both, sizes = matrix.diagonal(), matrix.sum(dim=0) + matrix.sum(dim=1)
        if counts.dim() == 1:
            both, sizes = both[1:], sizes[1:]
        occurs = sizes > 0
        if not occurs.any():
            return 1.0
        scores = 2 * both / sizes if self._score == "dice" else both / (sizes - both)
        return float(scores[occurs].mean())
