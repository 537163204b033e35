"""Overlap of what a model says with what is wanted: whole numbers a class, and the scores that are made of them."""

from __future__ import annotations

from typing import Literal

import torch
from torchmetrics import Metric

from samestep.errors import InputError

Score = Literal["dice", "iou", "accuracy"]


class Overlap(Metric):
    """Dice (which is F1) or intersection over union of all pixels, voxels or samples together.

    Of one output channel it is the score of that class. Of several it is the mean over classes that are wanted or found
    at all, the background among them. Where there is nothing wanted and nothing found it is 1.

    torchmetrics' own scores of masks compare every pixel with every class at once where algorithms are deterministic,
    which takes gigabytes, and decide by the values of a batch whether these are logits; so counting is done here.

    Args:
        score: which one; `accuracy` is the share of pixels that are right, background or not.
        classes: output channels.
        ignored: targets of this value do not count.
    """

    full_state_update = False
    higher_is_better = True
    counted: torch.Tensor
    both: torch.Tensor
    found: torch.Tensor
    wanted: torch.Tensor

    def __init__(self, score: Score, classes: int, ignored: int) -> None:
        super().__init__(sync_on_compute=False)
        self._score, self._classes, self._ignored = score, classes, ignored
        self.add_state("counted", torch.zeros(1, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("both", "found", "wanted"):
            self.add_state(name, torch.zeros(classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Count logits `(N, C, ...)` against class numbers `(N, ...)`, or `(N, 1, ...)` against zeros and ones."""
        self._require_fitting(outputs, targets)
        counted = targets != self._ignored
        self.counted += counted.sum()
        if self._classes == 1:
            found, wanted = [(outputs > 0) & counted], [(targets == 1) & counted]
        else:
            numbers = outputs.argmax(dim=1)
            found = [(numbers == number) & counted for number in range(self._classes)]
            wanted = [(targets == number) & counted for number in range(self._classes)]
        for number, (there, asked) in enumerate(zip(found, wanted, strict=True)):
            self.both[number] += (there & asked).sum()
            self.found[number] += there.sum()
            self.wanted[number] += asked.sum()

    def _require_fitting(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        wanted = outputs.shape if self._classes == 1 else (*outputs.shape[:1], *outputs.shape[2:])
        if outputs.shape[1] != self._classes or targets.shape != wanted:
            raise InputError(
                f"a metric of overlap was given outputs of shape {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)} for {self._classes} classes",
                rule="(N, C, ...) and class numbers (N, ...); for one class (N, 1, ...) and zeros and ones as large",
                do="look at model.options.num_classes and data.options.classes",
            )

    def compute(self) -> torch.Tensor:
        """The score, from whole numbers, in 64 bits."""
        both, sizes = self.both.double(), (self.found + self.wanted).double()
        if self._score == "accuracy":
            differ = (sizes - 2 * both).sum()  # twice, where there are several classes
            return 1 - differ / (self.counted.double().sum().clamp(min=1) * min(2, self._classes))
        is_there = sizes > 0
        if not is_there.any():
            return torch.ones((), dtype=torch.float64, device=both.device)
        scores = 2 * both / sizes if self._score == "dice" else both / (sizes - both)
        return scores[is_there].mean()
