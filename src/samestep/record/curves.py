"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from samestep.record.events import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_STEP_CURVES = ("loss", "lr", "grad_norm", "samples_per_second", "data_seconds")
_NOT_CURVES = ("event", "step", "epoch", "samples")


class Curves:
    """Writes numbers of steps and evaluations as TensorBoard scalars.

    Steps after the one that the run is resumed from are dropped from what an earlier writer left.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path, self._first_step = path, first_step
        self._writer: SummaryWriter | None = None

    def hear(self, event: Event) -> None:
        if event["event"] == "step":
            for name in _STEP_CURVES:
                self._open().add_scalar(f"train/{name}", event[name], event["step"])
        elif event["event"] == "evaluation":
            for name, value in event.items():
                if name not in _NOT_CURVES:
                    self._open().add_scalar(f"evaluation/{name}", value, event["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported when the first number is there: it takes a good part of a second.
            from torch.utils.tensorboard import SummaryWriter

            purge = self._first_step + 1 if self._first_step else None
            self._writer = SummaryWriter(self._path, purge_step=purge)
        return self._writer
