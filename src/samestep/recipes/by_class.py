"""Evaluation class by class."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from samestep.config import Recipe
from samestep.errors import InputError
from samestep.metrics import CountMetric
from samestep.recipes.build import Built
from samestep.record.class_table import averages, class_rows
from samestep.runtime.world import World

_MOST_CLASSES = 5_000  # whose matrix is still something that can be sent, written and looked at


class ClassCounts(CountMetric):
    """How often each class was taken for each other one; as one number, the mean recall of the classes.

    Attributes:
        counts: `counts[class][taken for]` of the evaluation that ended last.

    Raises:
        InputError: there are no classes to count, or too many.
    """

    def __init__(self, classes: int, device: torch.device, *, ignore_index: int = -100) -> None:
        if not 1 <= classes <= _MOST_CLASSES:
            raise InputError(
                f"the data of this recipe has {classes} classes",
                rule=f"a report by class needs 1 to {_MOST_CLASSES:,} of them",
                do="leave --report out",
            )
        super().__init__("balanced_accuracy", partial(_matrix, classes, ignore_index, device))
        self.counts: list[list[int]] = []

    def compute(self, world: World) -> float:
        """The mean recall over what all ranks counted, which stays in `counts`; the counts start anew."""
        state: torch.Tensor = self._metric.confmat
        world.all_reduce(state)
        self.counts = state.tolist()
        self.reset()
        return averages(class_rows(self.counts, [""] * len(self.counts)))[self.name]


def evaluate_by_class(built: Built, recipe: Recipe) -> dict[str, Any]:
    """What an evaluation finds, and the matrix behind it as `by_class`; the same on any number of ranks."""
    ignored, classes = recipe.loss.options.get("ignore_index", -100), built.facts.classes
    counted = ClassCounts(len(classes), built.engine.world.device, ignore_index=ignored)
    values: dict[str, Any] = dict(built.engine.evaluate(built.evaluation, [*built.metrics, counted]))
    names = list(classes) if len(classes) > 1 else ["background", *classes]  # of masks
    return values | {"by_class": {"classes": names, "counts": counted.counts}}


def _matrix(classes: int, ignored: int, device: torch.device) -> Any:
    from samestep.overlap import Overlap

    return Overlap("accuracy", classes, ignored).to(device)
