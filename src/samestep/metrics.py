"""Metrics over a dataset: torchmetrics' counts, summed over ranks once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable
from samestep.runtime.world import World


def _accuracy(classes: int) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(classes, average="micro", sync_on_compute=False)


def _top5(classes: int) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(classes, average="micro", top_k=min(5, classes), sync_on_compute=False)


METRICS: dict[str, Callable[[int], Any]] = {"accuracy": _accuracy, "top5": _top5}


class CountMetric:
    """A torchmetrics metric whose state is counts, which sum exactly in any order.

    Attributes:
        name: as in the recipe.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self.name, self._metric = name, metric

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Count one shard: logits `(N, C)` and class numbers `(N)`."""
        self._metric.update(outputs, targets)

    def compute(self, world: World) -> float:
        """The value over what all ranks counted; the counts start anew."""
        for name in self._metric._defaults:
            state = getattr(self._metric, name)
            assert not state.is_floating_point(), f"{self.name}: {name} is not a count"
            world.all_reduce(state)
        value = float(self._metric.compute())
        self._metric.reset()
        return value


def build_metrics(names: tuple[str, ...], classes: int, device: torch.device) -> list[CountMetric]:
    """The metrics behind a recipe's names."""
    # torchmetrics imports torchvision where it is installed; importing it takes a second, so only here.
    make_torchvision_importable()
    return [CountMetric(name, METRICS[name](classes).to(device)) for name in names]


def require_known_metrics(names: tuple[str, ...]) -> None:
    """Refuse names that are no metric.

    Raises:
        RecipeError: the first such name.
    """
    for name in names:
        if name not in METRICS:
            raise RecipeError(
                f"metric {name!r} is not known", rule=f"one of {', '.join(sorted(METRICS))}", do="correct the name"
            )
