"""Logger of another package: one line of CSV per evaluation."""

from pathlib import Path

from samestep.loggers.logger import Event, Logger


class CsvLogger(Logger):
    """Writes the loss of each evaluation to `metrics.csv` in the run directory."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.csv"

    def log_event(self, event: Event) -> None:
        if event["event"] == "evaluation":
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{event['epoch']},{event['loss']}\n")
