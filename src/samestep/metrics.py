"""Metrics over a dataset: torchmetrics' counts, summed over ranks once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import InputError, RecipeError
from samestep.runtime.vision import make_torchvision_importable
from samestep.runtime.world import World

if TYPE_CHECKING:  # it imports torchmetrics, which takes seconds
    from samestep.overlap import Score


def _accuracy(classes: int, ignored: int, top_k: int = 1) -> Any:
    if classes == 1:  # a mask of one class, which is there or not
        return _overlap("accuracy", classes, ignored)
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(
        classes, average="micro", top_k=min(top_k, classes), ignore_index=ignored, sync_on_compute=False
    )


def _overlap(score: Score, classes: int, ignored: int) -> Any:
    from samestep.overlap import Overlap

    return Overlap(score, classes, ignored)


_top5 = partial(_accuracy, top_k=5)
_dice = partial(_overlap, "dice")  # which is another name for f1

METRICS: dict[str, Callable[[int, int], Any]] = {
    "accuracy": _accuracy,
    "top5": _top5,
    "dice": _dice,
    "f1": _dice,
    "iou": partial(_overlap, "iou"),
}


class CountMetric:
    """A torchmetrics metric whose state is counts, which sum exactly in any order.

    Attributes:
        name: as in the recipe.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self._make = name, make

    def update(self, outputs: Any, targets: Any) -> None:
        """Count one shard: logits `(N, C)` and class numbers `(N)`, or `(N, C, ...)` and `(N, ...)`.

        Raises:
            InputError: one of them is not a tensor.
        """
        for what, value in (("the model's outputs", outputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"metric {self.name} was given {what} as a {type(value).__name__}",
                    rule="it compares a tensor of logits with a tensor of class numbers",
                    do="metrics: [] in the recipe; in a loop of your own, a metric that picks what it needs",
                )
        self._metric.update(outputs, targets)

    def compute(self, world: World) -> float:
        """The value over what all ranks counted; the counts start anew."""
        for name in self._metric._defaults:
            state = getattr(self._metric, name)
            assert not state.is_floating_point(), f"{self.name}: {name} is not a count"
            world.all_reduce(state)
        # The class's own compute: the instance's warns where this rank has seen no samples, though others have.
        value = float(type(self._metric).compute(self._metric))
        self.reset()
        return value

    def reset(self) -> None:
        """Forget what was counted."""
        if "_metric" in vars(self):  # making it takes seconds
            self._metric.reset()

    @cached_property
    def _metric(self) -> Any:
        # torchmetrics, and torchvision with it, take seconds to import: not before the first evaluation.
        make_torchvision_importable()
        return self._make()


class LossMetric:
    """A number that follows from the mean loss over all of an evaluation, which is exact; it rises with the loss.

    Attributes:
        name: as in the recipe.
    """

    def __init__(self, name: str, follow: Callable[[float], float]) -> None:
        self.name, self._follow = name, follow
        self.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Nothing to count."""

    def take(self, loss: float) -> None:
        """Remember the loss of the evaluation that is about to end."""
        self._loss = loss

    def compute(self, world: World) -> float:
        """The value for the loss taken last."""
        return self._follow(self._loss)

    def reset(self) -> None:
        """Forget the loss."""
        self._loss = math.nan


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


FROM_LOSS: dict[str, Callable[[float], float]] = {"perplexity": _perplexity}


def build_metrics(
    names: tuple[str, ...], classes: int, device: torch.device, *, ignore_index: int = -100
) -> list[CountMetric | LossMetric]:
    """The metrics behind a recipe's names.

    Args:
        ignore_index: targets of this value (padding) do not count.

    Raises:
        RecipeError: a name is not known.
    """
    for name in names:
        if name not in METRICS and name not in FROM_LOSS:
            known = ", ".join(sorted([*METRICS, *FROM_LOSS]))
            raise RecipeError(f"metric {name!r} is not known", rule=f"one of {known}", do="correct the name")
    return [
        LossMetric(name, FROM_LOSS[name])
        if name in FROM_LOSS
        else CountMetric(name, partial(_make, name, classes, ignore_index, device))
        for name in names
    ]


def _make(name: str, classes: int, ignored: int, device: torch.device) -> Any:
    return METRICS[name](classes, ignored).to(device)
