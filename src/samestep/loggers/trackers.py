"""Loggers by name, and those for TensorBoard and Weights & Biases.

A missing package raises `InputError`.

The id of a run of Weights & Biases is stored in the run directory, so that a resumed run continues
the same one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config import LOGGER_GROUP
from samestep.config.validation import require_package
from samestep.distributed.disk_operations import disk_operations, read_small
from samestep.distributed.env import read_wandb_mode
from samestep.loggers.logger import (
    EVENTS,
    Event,
    JsonlLogger,
    Logger,
    MetricLogger,
    write_errors,
)
from samestep.loggers.progress import ProgressLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def create_loggers(
    names: Sequence[str], run: Path, *, first_step: int = 0, quiet: bool = False
) -> list[Logger]:
    """Return the loggers of a run in the order of their names.

    Other names than those of `samestep.config.LOGGERS` are entry points in the group
    `samestep.loggers`: functions from the run directory to a `Logger`. Trackers continue the run
    with the id of the run directory.

    Args:
        names: names of loggers.
        run: run directory.
        first_step: step that the run continues after.
        quiet: show no progress.
    """
    # Functions: a tracker that is not selected need not be installed.
    create: dict[str, Callable[[], Logger]] = {
        "jsonl": lambda: JsonlLogger(run / EVENTS),
        "tensorboard": lambda: TensorBoardLogger(run / "tensorboard", first_step),
        "progress": lambda: ProgressLogger(quiet=quiet),
        "wandb": lambda: WandbLogger(run, resume=True),
    }
    others = [name for name in names if name not in create]
    for entry in entry_points(group=LOGGER_GROUP) if others else ():
        create.setdefault(entry.name, partial(_load, entry, run))
    return [create[name]() for name in names]


def _load(entry: EntryPoint, run: Path) -> Logger:
    logger: Logger = entry.load()(run)
    return logger


class TensorBoardLogger(MetricLogger):
    """Writes metrics as TensorBoard scalars.

    Args:
        path: log directory.
        first_step: step that the run continues after; TensorBoard hides later steps of the earlier
            files in the directory. An event `resume` sets this step too. None hides nothing.
    """

    def __init__(self, path: Path, first_step: int | None = None) -> None:
        self._path = path
        self._first_step = first_step
        self._writer: SummaryWriter | None = None

    def log_event(self, event: Event) -> None:
        if event["event"] == "resume" and self._first_step is not None:
            self.close()
            self._writer = None
            self._first_step = event["step"]
        super().log_event(event)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Outside of the disk operation: most of a second, more on a busy machine.
        from torch.utils.tensorboard import SummaryWriter

        with disk_operations.run("write", self._path):
            if self._writer is None:
                purge_step = None
                if self._first_step is not None and self._path.exists():
                    purge_step = self._first_step + 1
                self._writer = SummaryWriter(self._path, purge_step=purge_step)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            with disk_operations.run("write", self._path):
                self._writer.close()


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows a folder in TensorBoard."""
    program = "tensorboard"
    if not shutil.which(program):
        program = str(Path(sys.executable).with_name(program))
    return f"{program} --logdir {shlex.quote(str(folder))}"


class WandbLogger(MetricLogger):
    """Logs metrics and the recipe to Weights & Biases.

    Without WANDB_MODE, the mode is offline: files are written to `wandb/` in the run directory, and
    `wandb sync` uploads them.

    Args:
        run: run directory; its name is the name of the run in Weights & Biases.
        resume: continue the run that an earlier logger of this directory created.
    """

    def __init__(self, run: Path, *, resume: bool = False) -> None:
        require_package("the logger wandb", "wandb", "'samestep[loggers]'")
        self._directory = run
        self._id_path = run / "wandb" / "run-id.txt"
        self._resume = resume
        self._run: Any = None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the recipe as the configuration of the run."""
        self._open().config.update(dict(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._open().log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Any:
        if self._run is None:
            import wandb

            run_id = None
            if self._resume and self._id_path.exists():
                run_id = read_small(self._id_path).decode()
            resume = None if run_id is None else "allow"
            with write_errors(wandb.Error):
                self._run = wandb.init(
                    project="samestep",
                    name=self._directory.resolve().name,
                    dir=self._directory,
                    mode=read_wandb_mode() or "offline",
                    id=run_id,
                    resume=resume,
                    settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
                )
            with write_errors(OSError):
                self._id_path.parent.mkdir(exist_ok=True)
                self._id_path.write_text(self._run.id, encoding="utf-8")
        return self._run
