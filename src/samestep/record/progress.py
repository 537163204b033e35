"""What a person sees while a run goes on: one line that moves, and one line an epoch that stays."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from samestep.record.events import Event
from samestep.record.values import shown


class ProgressLine:
    """Shows steps on one terminal line and epochs as lines above it; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} samples/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def hear(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._move(event)
        elif kind == "evaluation":
            self._console.print(epoch_line(event), highlight=False, markup=False, emoji=False, soft_wrap=True)
        elif kind in ("note", "skipped", "stop"):
            self._console.print(event["text"], highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

    def _move(self, event: Event) -> None:
        fields = {"epoch": event["epoch"] + 1, "loss": event["loss"], "speed": event["samples_per_second"]}
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=event["steps_in_epoch"], **fields)
        self._bar.update(self._task, completed=event["step_in_epoch"], **fields)


def epoch_line(event: Event) -> str:
    """One evaluation in one line, without what depends on the machine's speed."""
    known = ("event", "step", "epoch", "epochs", "train_loss", "loss", "samples", "is_best", "samples_per_second")
    metrics = "  ".join(f"{name} {shown(name, value)}" for name, value in event.items() if name not in known)
    best = "  best" if event["is_best"] else ""
    return (
        f"epoch {event['epoch']:>{len(str(event['epochs']))}}/{event['epochs']}  "
        f"train loss {event['train_loss']:.4f}  loss {event['loss']:.4f}  {metrics}  "
        f"{event['samples_per_second']:,.0f} samples/s{best}"
    )
