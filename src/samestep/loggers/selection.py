"""Loggers of a run by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from samestep.loggers.logger import JsonlLogger, Logger
from samestep.loggers.progress import ProgressLogger
from samestep.loggers.trackers import MLflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger

EVENTS = "events.jsonl"


def create_loggers(
    names: Sequence[str], run: Path, place: Path, *, first_step: int = 0, quiet: bool = False
) -> list[Logger]:
    """Return the loggers of a run, some of `samestep.config.LOGGERS`, in the order of their names.

    Trackers continue the run whose id is in the run directory.

    Args:
        names: names of loggers.
        run: run directory.
        place: path that leads to the run directory wherever it is: TensorBoard opens its files again and again.
        first_step: step that the run continues after.
        quiet: show no progress.
    """
    create: dict[str, Callable[[], Logger]] = {
        "jsonl": lambda: JsonlLogger(run / EVENTS),
        "tensorboard": lambda: TensorBoardLogger(place / "tensorboard", first_step),
        "progress": lambda: ProgressLogger(Console(stderr=True, quiet=quiet)),
        "wandb": lambda: WandbLogger(run, resume=True),
        "mlflow": lambda: MLflowLogger(run, resume=True),
        "trackio": lambda: TrackioLogger(run, resume=True),
    }
    return [create[name]() for name in names]
