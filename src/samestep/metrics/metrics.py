"""Metrics over a dataset: counts of torchmetrics, summed over ranks once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from samestep.distributed.world import World
from samestep.errors import InputError, RecipeError
from samestep.torchvision_import import make_torchvision_importable

if TYPE_CHECKING:  # imports torchmetrics, which takes seconds
    from samestep.metrics.segmentation import Score


def _accuracy(classes: int, ignore_index: int, top_k: int = 1) -> Any:
    if classes == 1:  # a binary mask
        return _overlap("accuracy", classes, ignore_index)
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(
        classes, average="micro", top_k=min(top_k, classes), ignore_index=ignore_index, sync_on_compute=False
    )


def _overlap(score: Score, classes: int, ignore_index: int) -> Any:
    from samestep.metrics.segmentation import OverlapMetric

    return OverlapMetric(score, classes, ignore_index)


METRICS: dict[str, Callable[[int, int], Any]] = {
    "accuracy": _accuracy,
    "top5": partial(_accuracy, top_k=5),
    "dice": partial(_overlap, "dice"),
    "f1": partial(_overlap, "dice"),
    "iou": partial(_overlap, "iou"),
}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


LOSS_METRICS: dict[str, Callable[[float], float]] = {"perplexity": _perplexity}


class CountMetric:
    """A torchmetrics metric with integer counts as state; their sum is exact in any order."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self._make = name, make

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one microbatch: logits `(N, C)` and class indices `(N)`, or `(N, C, ...)` and `(N, ...)`.

        Raises:
            InputError: an argument is not a tensor.
        """
        for argument, value in (("the model's outputs", outputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"metric {self.name} received {argument} as a {type(value).__name__}",
                    expected="a tensor of logits and a tensor of class indices",
                    fix="set metrics: [] in the recipe; in a custom loop, use a metric that selects its arguments",
                    code="E_METRIC",
                )
        self._metric.update(outputs, targets)

    def compute(self, world: World) -> float:
        """Return the value over the counts of all ranks, and reset the counts."""
        for name in self._metric._defaults:
            state = getattr(self._metric, name)
            assert not state.is_floating_point(), f"{self.name}: {name} is not a count"
            world.all_reduce(state)
        # `compute` of the class: that of the instance warns if this rank has no samples, even if other ranks have.
        value = float(type(self._metric).compute(self._metric))
        self.reset()
        return value

    def reset(self) -> None:
        """Reset the counts."""
        if "_metric" in vars(self):  # do not create the metric, which takes seconds
            self._metric.reset()

    @cached_property
    def _metric(self) -> Any:
        # The import of torchmetrics and torchvision takes seconds: not before the first evaluation.
        make_torchvision_importable()
        return self._make()


class LossMetric(NamedTuple):
    """An increasing function of the exact mean loss of an evaluation."""

    name: str
    function: Callable[[float], float]


def build_metrics(
    names: tuple[str, ...], classes: int, device: torch.device, *, ignore_index: int = -100
) -> list[CountMetric | LossMetric]:
    """Return the metrics of a recipe by name; targets of the value `ignore_index` (padding) are not counted.

    Raises:
        RecipeError: a name is unknown.
    """
    metrics: list[CountMetric | LossMetric] = []
    for name in names:
        if name in LOSS_METRICS:
            metrics.append(LossMetric(name, LOSS_METRICS[name]))
        elif name in METRICS:
            make = METRICS[name]
            metrics.append(CountMetric(name, lambda make=make: make(classes, ignore_index).to(device)))  # type: ignore[misc]
        else:
            raise RecipeError(
                f"metric {name!r} is not known",
                expected=f"one of {', '.join(sorted([*METRICS, *LOSS_METRICS]))}",
                fix="correct the name",
                code="E_METRIC",
            )
    return metrics
