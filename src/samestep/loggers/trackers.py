"""Loggers by name: those for the terminal, TensorBoard and Weights & Biases.

A missing package raises `InputError`.

The id of a run of Weights & Biases is stored in the run directory, so that a resumed run continues
the same one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config import LOGGER_GROUP
from samestep.config.validation import require_package
from samestep.distributed.disk_operations import disk_operations, read_small
from samestep.distributed.env import read_wandb_mode
from samestep.distributed.logging import plain_console
from samestep.errors import printable
from samestep.loggers.logger import (
    EVENTS,
    NOT_METRICS,
    Event,
    JsonlLogger,
    Logger,
    MetricLogger,
    format_metric,
    write_errors,
)
from samestep.units import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from torch.utils.tensorboard import SummaryWriter


_LINE_SECONDS = 60.0  # between lines about the progress without a terminal
_NO_TERMINAL_METRICS = (
    *(*NOT_METRICS, "epochs"),
    *("is_best", "skipped_steps", "samples_per_second"),
)


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


class ProgressLogger(Logger):
    """Prints steps and evaluation batches as a progress bar, and other events as lines.

    Without a terminal, a line about the progress is printed if no line was printed for a minute.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        from rich import progress  # slow, and not used by `tensorboard_command`

        self._console = console or plain_console(stderr=True, quiet=quiet)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._last_line = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        texts = [f"{name} {value:.4g}" for name, value in values.items()]
        self._print("  ".join([f"step {step}", *texts]))

    def log_event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            text = f"loss {event['loss']:.4f}  {event['samples_per_second']:,.0f} samples/s"
            label = f"epoch {event['epoch'] + 1}"
            self.log_progress(label, event["step_in_epoch"], event["steps_in_epoch"], text)
        elif kind == "evaluation":
            self._print(evaluation_line(event))
        elif kind in ("memory", "note", "resume", "skipped", "stop"):
            self._print(event["text"])

    def log_progress(self, label: str, done: int, total: int, text: str = "") -> None:
        """Show `done` of `total` steps or batches."""
        if not self._console.is_terminal:
            if time.monotonic() - self._last_line >= _LINE_SECONDS:
                self._print(f"{label}  {done}/{total}  {text}".rstrip())
            return
        state: Any = {"description": label, "completed": done, "total": total, "text": text}
        if self._task is None:
            self._task = self._bar.add_task(**state)
            self._bar.start()
        elif label == self._label:
            self._bar.update(self._task, **state)
        else:
            self._bar.refresh()  # with the end of the earlier work
            # The remaining time follows from the speed of the same work.
            self._bar.reset(self._task, **state)
        self._label = label

    def close(self) -> None:
        self._bar.stop()

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        plain: Any = {"highlight": False, "markup": False, "emoji": False}
        self._console.print(printable(line), soft_wrap=True, **plain)


def evaluation_line(event: Event) -> str:
    """Format an evaluation as one line."""
    columns = []
    for name, value in event.items():
        if name in _NO_TERMINAL_METRICS or name.startswith("train_"):
            continue
        if f"train_{name}" in event:
            columns.append(f"train {name} {format_metric(name, event[f'train_{name}']):>7}")
        columns.append(f"val {name} {format_metric(name, value):>7}")
    best = "  best" if event["is_best"] else ""
    skipped = ""
    if event["skipped_steps"]:
        skipped = f"  skipped {plural(event['skipped_steps'], 'step')}"
    return (
        f"epoch {event['epoch']:>{len(str(event['epochs']))}}/{event['epochs']}  "
        f"{'  '.join(columns)}  "
        f"{event['samples_per_second']:6,.0f} samples/s{skipped}{best}"
    )


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
