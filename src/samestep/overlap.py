"""How what a model says overlaps with what is wanted: a matrix of whole numbers, and the scores that are made of it."""

from __future__ import annotations

from typing import Literal

import torch
from torchmetrics import Metric

from samestep.errors import InputError

MOST_CLASSES = 5_000
Score = Literal["dice", "iou", "accuracy"]


class Overlap(Metric):
    """Dice (which is F1) or intersection over union of all pixels, voxels or samples together.

    Of one output channel it is the score of that class. Of several it is the mean over classes that are wanted or found
    at all, the background among them. Where there is nothing wanted and nothing found it is 1.

    Counting is done here, because torchmetrics' own matrix takes gigabytes where algorithms are deterministic (it
    compares every pixel with every pair of classes at once), and its binary scores decide by the values of a batch
    whether these are logits.

    Attributes:
        confmat: `confmat[wanted, found]`, counts; with one class, 0 is the background.

    Args:
        score: which one; `accuracy` is the share of pixels that are right, background or not.
        classes: output channels.
        ignored: targets of this value do not count.

    Raises:
        InputError: there are too many classes.
    """

    full_state_update = False
    higher_is_better = True
    confmat: torch.Tensor

    def __init__(self, score: Score, classes: int, ignored: int) -> None:
        super().__init__(sync_on_compute=False)
        if classes > MOST_CLASSES:
            raise InputError(
                f"a metric of overlap was asked for {classes:,} classes",
                rule=f"it counts pairs of classes, for up to {MOST_CLASSES:,} of them",
                do="another metric",
            )
        self._score, self._classes, self._ignored = score, classes, ignored
        self._numbers = max(2, classes)
        counts = torch.zeros(self._numbers, self._numbers, dtype=torch.int64)
        self.add_state("confmat", counts, dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Count logits `(N, C, ...)` against class numbers `(N, ...)`, or `(N, 1, ...)` against zeros and ones.

        Raises:
            InputError: shapes do not fit together.
        """
        self._require_fitting(outputs, targets)
        found = outputs > 0 if self._classes == 1 else outputs.argmax(dim=1)
        counted = targets != self._ignored
        pairs = targets[counted].long() * self._numbers + found[counted].long()
        # Whole numbers: on every device the sum is the same in any order.
        self.confmat += torch.bincount(pairs, minlength=self._numbers**2).view_as(self.confmat)

    def compute(self) -> torch.Tensor:
        """The score, in 64 bits."""
        counts = self.confmat.double()
        both, sizes = counts.diagonal(), counts.sum(dim=0) + counts.sum(dim=1)
        if self._score == "accuracy":
            return both.sum() / counts.sum().clamp(min=1)
        if self._classes == 1:
            both, sizes = both[1:], sizes[1:]
        is_there = sizes > 0
        if not is_there.any():
            return torch.ones((), dtype=torch.float64, device=counts.device)
        scores = 2 * both / sizes if self._score == "dice" else both / (sizes - both)
        return scores[is_there].mean()

    def _require_fitting(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        wanted = outputs.shape if self._classes == 1 else (*outputs.shape[:1], *outputs.shape[2:])
        if outputs.shape[1] != self._classes or targets.shape != wanted:
            raise InputError(
                f"a metric of overlap was given outputs of shape {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)} for {self._classes} classes",
                rule="(N, C, ...) and class numbers (N, ...); for one class (N, 1, ...) and zeros and ones as large",
                do="look at model.options.num_classes and data.options.classes",
            )
