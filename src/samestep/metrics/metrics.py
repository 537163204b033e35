"""Metrics of an evaluation: from integer counts, from the loss, by name; and the best value.

The sum of integers over batches is exact in any order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from samestep.distributed.device_reads import device_reads
from samestep.errors import InputError, RecipeError

MAX_CLASSES = 5_000  # of a confusion matrix
_metric_error = partial(InputError, code="E_METRIC")
Mode = Literal["min", "max"]


class CountMetric(ABC):
    """Metric of logits and class numbers, computed from integer counts.

    One output channel is binary: a positive logit is class 1.

    Args:
        name: key of the metric in the results of an evaluation.
        classes: required number of output channels; None for any number.
        ignore_index: targets of this value (padding) are not counted.
    """

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
                raise _metric_error(
                    f"metric {self.name} received {argument} as a {type(value).__name__}",
                    expected="a tensor of logits and a tensor of class numbers",
                    fix="set metrics: [] in the recipe",
                )
        channels = channels_of(outputs, targets)
        if channels is None or channels != (self.classes or channels):
            classes = f" for {self.classes} classes" if self.classes else ""
            raise _metric_error(
                f"metric {self.name} received outputs of shape {tuple(outputs.shape)} and targets "
                f"of shape {tuple(targets.shape)}{classes}",
                expected="outputs (N, C, ...) and class numbers (N, ...); for one class, binary "
                "targets (N, 1, ...)",
                fix="check model.options.num_classes and data.options.classes",
            )
        with device_reads.waiting(outputs.device):  # for the number of counted targets
            counts = self.count(outputs, targets, targets != self.ignore_index, channels)
        if self.counts is not None:
            counts = self.counts + counts
        self.counts = counts

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


def channels_of(outputs: Any, targets: Any) -> int | None:
    """Return the number of output channels; None if the targets are no class of each output."""
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return None
    channels = 1
    expected = outputs.shape
    if outputs.dim() > 1 and outputs.shape[1] != 1:
        channels = outputs.shape[1]
        expected = torch.Size([*outputs.shape[:1], *outputs.shape[2:]])
    if targets.shape != expected:
        return None
    return channels


class Accuracy(CountMetric):
    """Share of the targets that are among the `top_k` largest logits; 0 without targets."""

    top_k = 1

    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        if channels == 1:
            hits = (outputs > 0) == targets
        elif self.top_k == 1:
            hits = outputs.argmax(dim=1) == targets
        else:
            largest = outputs.topk(min(self.top_k, channels), dim=1).indices
            hits = (largest == targets.unsqueeze(1)).any(dim=1)
        return torch.stack([(hits & is_counted).sum(), is_counted.sum()])

    def value(self, counts: torch.Tensor) -> float:
        hits, count = counts.float()  # in float32, as in torchmetrics
        return float(hits / count.clamp(min=1))


class Top5Accuracy(Accuracy):
    """Share of the targets that are among the five largest logits."""

    top_k = 5


class ConfusionMatrix(CountMetric):
    """Counts `[target, prediction]`; a vector of four counts for one output channel."""

    def count(
        self, outputs: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, channels: int
    ) -> torch.Tensor:
        if channels > MAX_CLASSES:
            raise _metric_error(
                f"the {self.name} metric does not support {channels:,} classes",
                expected=f"at most {MAX_CLASSES:,} classes, because pairs of classes are counted",
                fix="use another metric",
            )
        size = max(2, channels)
        predictions = outputs > 0 if channels == 1 else outputs.argmax(dim=1)
        counted = targets[is_counted].long()
        outside = counted[(counted < 0) | (counted >= size)]
        if len(outside):
            raise _metric_error(
                f"metric {self.name} received the target {int(outside[0])}",
                expected=f"targets from 0 to {size - 1}, or the ignored value {self.ignore_index}",
                fix="check model.options.num_classes and the masks, or set "
                "loss.options.ignore_index",
            )
        # Integers: the sum is independent of the order on every device. A pair of classes is one
        # number, since `bincount` takes vectors.
        counts = torch.bincount(counted * size + predictions[is_counted].long(), minlength=size**2)
        if channels == 1:
            return counts
        return counts.view(size, size)


class IntersectionOverUnion(ConfusionMatrix):
    """Intersection over union of all pixels or samples together.

    With one output channel, the score of that class. With several, the mean over the classes that
    occur in targets or predictions, including the background; 1 if none occurs.
    """

    def value(self, counts: torch.Tensor) -> float:
        is_binary = counts.dim() == 1
        if is_binary:
            counts = counts.view(2, 2)
        # Exact for counts up to 2^53.
        matrix = counts.double()
        both = matrix.diagonal()
        sizes = matrix.sum(dim=0) + matrix.sum(dim=1)
        if is_binary:  # without the background
            both = both[1:]
            sizes = sizes[1:]
        occurs = sizes > 0
        if not occurs.any():
            return 1.0
        return float(self.scores(both, sizes)[occurs].mean())

    def scores(self, both: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return the score of each class from its intersection, and from its two sizes together."""
        return both / (sizes - both)


class Dice(IntersectionOverUnion):
    """Dice score, or F1, of the same counts."""

    def scores(self, both: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return 2 * both / sizes


METRICS: dict[str, type[CountMetric]] = {
    "accuracy": Accuracy,
    "top5": Top5Accuracy,
    "dice": Dice,
    "f1": Dice,
    "iou": IntersectionOverUnion,
}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


LOSS_METRICS: dict[str, Callable[[float], float]] = {"perplexity": _perplexity}


class LossMetric(NamedTuple):
    """An increasing function of the exact mean loss of an evaluation."""

    name: str
    function: Callable[[float], float]


def build_metrics(
    names: Iterable[str], classes: int | None = None, *, ignore_index: int = -100
) -> list[CountMetric | LossMetric]:
    """Return metrics by name; targets of the value `ignore_index` (padding) are not counted.

    Raises:
        RecipeError: a name is unknown.
    """
    metrics: list[CountMetric | LossMetric] = []
    for name in names:
        if name in LOSS_METRICS:
            metrics.append(LossMetric(name, LOSS_METRICS[name]))
        elif name in METRICS:
            metrics.append(METRICS[name](name, classes, ignore_index))
        else:
            raise RecipeError(
                f"metric {name!r} is not known",
                expected=f"one of {', '.join(sorted([*METRICS, *LOSS_METRICS]))}",
                fix="correct the name",
                code="E_METRIC",
            )
    return metrics


@dataclass(frozen=True)
class BestRule:
    """The smallest or largest value of one result of an evaluation.

    Attributes:
        by: key of a result: `loss`, or the name of a metric or of a loss term.
        mode: `min` or `max`.
    """

    by: str
    mode: Mode

    @classmethod
    def of(cls, by: str | None, mode: Mode | None, metrics: Sequence[str] = ()) -> BestRule:
        """Return a rule with defaults.

        Args:
            by: None for the first of `metrics`; the loss without metrics, or if the first is a
                function of the loss.
            mode: None for `min` of losses and `max` of the built-in metrics.
            metrics: names of metrics.

        Raises:
            InputError: the mode of a metric that is not built in is missing, or is neither `min`
                nor `max`.
        """
        if by is None:
            by = metrics[0] if metrics and metrics[0] not in LOSS_METRICS else "loss"
        if mode is None and (by == "loss" or by.startswith("loss_") or by in LOSS_METRICS):
            mode = "min"
        if mode is None and by in METRICS:
            mode = "max"
        if mode not in ("min", "max"):
            raise _metric_error(
                f"best_by is {by} and best_mode is {mode}",
                expected="best_mode min or max for a metric that is not built in",
                fix=f"set best_by: {by} and best_mode: max, if higher values are better",
            )
        return cls(by, mode)

    def is_best(self, values: Mapping[str, float], best: float | None) -> bool:
        """Return whether the results of an evaluation are better than the best value so far.

        Results with a loss or a value that is not finite are never the best.

        Raises:
            InputError: the results have no value of this name.
        """
        if self.by not in values:
            raise _metric_error(
                f"best_by is {self.by}, which the evaluation did not return",
                expected=f"one of {', '.join(name for name in values if name != 'samples')}",
                fix="correct best_by, or add the metric to the evaluation",
            )
        value = values[self.by]
        # A comparison with NaN is false in both directions, so NaN would stay the best value.
        if not (math.isfinite(values.get("loss", 0.0)) and math.isfinite(value)):
            return False
        if best is None:
            return True
        if self.mode == "min":
            return value < best
        return value > best
