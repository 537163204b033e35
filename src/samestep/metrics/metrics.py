"""Metrics of an evaluation by name or as objects: counts, functions of the loss, and metrics of torchmetrics."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from samestep.distributed.world import World
from samestep.errors import InputError, RecipeError
from samestep.metrics.counts import Accuracy, CountMetric
from samestep.metrics.segmentation import OverlapMetric

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
    """Number over a dataset, computed microbatch by microbatch."""

    name: str

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one microbatch."""

    def compute(self, world: World) -> float:
        """Return the value over all ranks, and reset the counts. A collective."""

    def reset(self) -> None:
        """Reset the counts."""


class LossMetric(NamedTuple):
    """An increasing function of the exact mean loss of an evaluation."""

    name: str
    function: Callable[[float], float]


# A name, an object with the methods of `Metric`, or a metric of torchmetrics.
Metrics = Iterable[Any] | Mapping[str, Any]


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


def as_metrics(metrics: Metrics, *, ignore_index: int = -100) -> list[Metric | LossMetric]:
    """Return the metrics of a list, or of a mapping from names; see `Metrics`.

    The name of a metric of torchmetrics in a list is that of its class, such as `multiclass_f1_score`.

    Raises:
        InputError: a metric is unknown or cannot be summed over ranks, or two have the same name.
    """
    pairs = metrics.items() if isinstance(metrics, Mapping) else ((None, metric) for metric in metrics)
    result = [_as_metric(name, metric, ignore_index) for name, metric in pairs]
    names = [metric.name for metric in result]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InputError(
            f"several metrics have the name {repeated[0]}",
            expected="different names",
            fix='pass a mapping: metrics={"top1": MulticlassAccuracy(10), "top5": MulticlassAccuracy(10, top_k=5)}',
            code="E_METRIC",
        )
    return result


def _as_metric(name: str | None, metric: Any, ignore_index: int) -> Any:
    library = sys.modules.get("torchmetrics")
    if library is not None and isinstance(metric, library.Metric):
        from samestep.metrics.torchmetrics_adapter import TorchMetric

        return TorchMetric(name or _snake_case(type(metric).__name__), metric)
    if name is not None:
        raise InputError(
            f"the metric with the name {name} is a {type(metric).__name__}",
            expected="metrics of torchmetrics in a mapping",
            fix="pass other metrics in a list; they have names",
            code="E_METRIC",
        )
    return build_metrics([metric], ignore_index=ignore_index)[0] if isinstance(metric, str) else metric


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
