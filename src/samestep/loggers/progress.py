"""Progress of a run on the terminal: a bar, and lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samestep.distributed.logging import plain_console
from samestep.loggers.logger import NOT_METRICS, Event, Logger, format_metric
from samestep.number_text import plural
from samestep.report_text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_LINE_SECONDS = 60.0  # between lines about the progress without a terminal
_NO_TERMINAL_METRICS = (
    *(*NOT_METRICS, "epochs"),
    *("is_best", "skipped_steps", "samples_per_second"),
)


class ProgressLogger(Logger):
    """Prints steps and evaluation batches as a progress bar, and other events as lines.

    Without a terminal, a line about the progress is printed if no line was printed for a minute.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        from rich import progress  # slow

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
        if kind == "step" and "loss" in event:  # of a recipe; a loop of one's own calls `log`
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
        # Brackets in a path or a name are no markup.
        plain: Any = {"highlight": False, "markup": False, "emoji": False}
        # Rich would break lines at 80 columns without a terminal.
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
