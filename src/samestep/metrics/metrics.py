"""Metrics of an evaluation by name, and the best value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from samestep.errors import InputError, RecipeError
from samestep.metrics.counts import Accuracy, CountMetric, OverlapMetric

Mode = Literal["min", "max"]
METRICS: dict[str, Callable[[str, int | None, int], CountMetric]] = {
    "accuracy": Accuracy,
    "top5": partial(Accuracy, top_k=5),
    "dice": partial(OverlapMetric, score="dice"),
    "f1": partial(OverlapMetric, score="dice"),
    "iou": partial(OverlapMetric, score="iou"),
}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


LOSS_METRICS: dict[str, Callable[[float], float]] = {"perplexity": _perplexity}


class Metric(Protocol):
    """Number over a dataset, computed batch by batch."""

    name: str

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch."""

    def compute(self) -> float:
        """Return the value, and reset the counts."""

    def reset(self) -> None:
        """Reset the counts."""


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
        by: key among the results of an evaluation: `loss`, or the name of a metric or of a loss
            term.
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
            raise InputError(
                f"best_by is {by} and best_mode is {mode}",
                expected="best_mode min or max for a metric that is not built in",
                fix=f"set best_by: {by} and best_mode: max, if higher values are better",
                code="E_METRIC",
            )
        return cls(by, mode)

    def is_best(self, values: Mapping[str, float], best: float | None) -> bool:
        """Return whether the results of an evaluation are better than the best value so far.

        Results with a loss or a value that is not finite are never the best.

        Raises:
            InputError: the results have no value of this name.
        """
        if self.by not in values:
            raise InputError(
                f"best_by is {self.by}, which the evaluation did not return",
                expected=f"one of {', '.join(name for name in values if name != 'samples')}",
                fix="correct best_by, or add the metric to the evaluation",
                code="E_METRIC",
            )
        value = values[self.by]
        if not (math.isfinite(values.get("loss", 0.0)) and math.isfinite(value)):
            return False
        return best is None or (value < best if self.mode == "min" else value > best)
