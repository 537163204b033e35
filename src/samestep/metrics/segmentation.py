"""Dice, intersection over union and pixel accuracy from a confusion matrix."""

from __future__ import annotations

from typing import Literal

import torch

from samestep.errors import InputError
from samestep.torchvision_import import make_torchvision_importable

# torchmetrics imports torchvision. Fork servers of commands that evaluate preload this module, because the import takes
# seconds.
make_torchvision_importable()

from torchmetrics import Metric  # noqa: E402

MAX_CLASSES = 5_000
Score = Literal["dice", "iou", "accuracy"]


class OverlapMetric(Metric):
    """Dice (F1) or intersection over union of all pixels, voxels or samples together.

    With one output channel, the score of that class. With several, the mean over the classes that occur in targets or
    predictions, including the background; 1 if none occurs.

    `accuracy` is the share of correct pixels including the background. Targets of the value `ignore_index` are not
    counted. Counting is implemented here for two reasons: with deterministic algorithms, torchmetrics' confusion matrix
    needs gigabytes (every pixel is compared with every pair of classes), and its binary scores guess from the values of
    a batch whether these are logits.

    Attributes:
        confmat: counts `confmat[target, prediction]`; with one class, index 0 is the background.

    Raises:
        InputError: too many classes.
    """

    full_state_update = False
    higher_is_better = True
    confmat: torch.Tensor

    def __init__(self, score: Score, classes: int, ignore_index: int) -> None:
        super().__init__(sync_on_compute=False)
        if classes > MAX_CLASSES:
            raise InputError(
                f"the {score} metric does not support {classes:,} classes",
                expected=f"at most {MAX_CLASSES:,} classes, because pairs of classes are counted",
                fix="use another metric",
                code="E_METRIC",
            )
        self._score, self._classes, self._ignore_index = score, classes, ignore_index
        self._size = max(2, classes)
        self.add_state("confmat", torch.zeros(self._size, self._size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Count logits `(N, C, ...)` and class indices `(N, ...)`, or for one class binary targets `(N, 1, ...)`.

        Raises:
            InputError: shapes do not match.
        """
        expected = outputs.shape if self._classes == 1 else (*outputs.shape[:1], *outputs.shape[2:])
        if outputs.shape[1] != self._classes or targets.shape != expected:
            raise InputError(
                f"the {self._score} metric received outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)} for {self._classes} classes",
                expected="outputs (N, C, ...) and class indices (N, ...); for one class, binary targets (N, 1, ...)",
                fix="check model.options.num_classes and data.options.classes",
                code="E_METRIC",
            )
        predictions = outputs > 0 if self._classes == 1 else outputs.argmax(dim=1)
        counted = targets != self._ignore_index
        pairs = targets[counted].long() * self._size + predictions[counted].long()
        # Integers: the sum is independent of the order on every device.
        self.confmat += torch.bincount(pairs, minlength=self._size**2).view_as(self.confmat)

    def compute(self) -> torch.Tensor:
        """Return the score as a float64 scalar."""
        counts = self.confmat.double()
        both, sizes = counts.diagonal(), counts.sum(dim=0) + counts.sum(dim=1)
        if self._score == "accuracy":
            return both.sum() / counts.sum().clamp(min=1)
        if self._classes == 1:
            both, sizes = both[1:], sizes[1:]
        occurs = sizes > 0
        if not occurs.any():
            return torch.ones((), dtype=torch.float64, device=counts.device)
        scores = 2 * both / sizes if self._score == "dice" else both / (sizes - both)
        return scores[occurs].mean()
