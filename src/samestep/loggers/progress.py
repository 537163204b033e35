"""Progress of a run on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from samestep.errors import printable
from samestep.loggers.logger import NOT_METRICS, Event, Logger, format_metric
from samestep.units import plural

_LINE_SECONDS = 60.0  # between lines about the progress without a terminal


class ProgressLogger(Logger):
    """Prints steps and evaluation batches as a progress bar, and other events as lines.

    Without a terminal, a line about the progress is printed if no line was printed for
    `line_seconds`.
    """

    def __init__(self, console: Console | None = None, line_seconds: float = _LINE_SECONDS) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._line_seconds = line_seconds
        self._last_line = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._print(
            "  ".join([f"step {step}", *(f"{name} {value:.4g}" for name, value in values.items())])
        )

    def log_event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            text = f"loss {event['loss']:.4f}  {event['samples_per_second']:,.0f} samples/s"
            self.log_progress(
                f"epoch {event['epoch'] + 1}", event["step_in_epoch"], event["steps_in_epoch"], text
            )
        elif kind == "evaluation":
            self._print(evaluation_line(event))
        elif kind in ("cache", "memory", "note", "resume", "skipped", "stop"):
            self._print(event["text"])

    def log_progress(self, label: str, done: int, total: int, text: str = "") -> None:
        """Show `done` of `total` steps or batches."""
        if not self._console.is_terminal:
            if time.monotonic() - self._last_line >= self._line_seconds:
                self._print(f"{label}  {done}/{total}  {text}".rstrip())
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", text="")
        if label != self._label:
            self._bar.reset(
                self._task
            )  # the remaining time follows from the speed of the same work
            self._label = label
        self._bar.update(self._task, description=label, completed=done, total=total, text=text)

    def close(self) -> None:
        self._bar.stop()

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(
            printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True
        )


def evaluation_line(event: Event) -> str:
    """Format an evaluation as one line."""
    fixed = (
        *NOT_METRICS,
        "epochs",
        "train_loss",
        "loss",
        "is_best",
        "skipped_steps",
        "samples_per_second",
    )
    metrics = "  ".join(
        f"{name} {format_metric(name, value)}" for name, value in event.items() if name not in fixed
    )
    best = "  best" if event["is_best"] else ""
    skipped = (
        f"  skipped {plural(event['skipped_steps'], 'step')}" if event["skipped_steps"] else ""
    )
    return (
        f"epoch {event['epoch']:>{len(str(event['epochs']))}}/{event['epochs']}  "
        f"train loss {event['train_loss']:.4f}  loss {event['loss']:.4f}  {metrics}  "
        f"{event['samples_per_second']:,.0f} samples/s{skipped}{best}"
    )
