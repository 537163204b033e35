"""Loggers of a run: their protocol, the fan-out to several, and events as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from samestep.distributed.disk_operations import HeldFolder, disk_operations, regular_file
from samestep.errors import EXIT_FAILED, EXIT_STOPPED, RunError, RunMovedError, SamestepError
from samestep.report_text import class_name, message_of

Event = Mapping[str, Any]
_STEP_METRICS = ("loss", "lr", "grad_norm", "samples_per_second", "data_seconds")
EVENTS = "events.jsonl"  # file of `JsonlLogger` in a run directory
NOT_METRICS = ("event", "step", "epoch", "samples")  # keys of events that are no metrics


class Logger(Protocol):
    """Destination of the metrics and events of a run.

    A constructor opens no file and no connection, so every rank can construct a logger. Only rank 0
    calls the methods.
    """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved recipe, before the first step; subclasses may ignore the recipe."""
        return

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of an optimizer step."""

    def log_event(self, event: Event) -> None:
        """Log an event of kind `event["event"]`; docs/reference/events.md lists the other keys."""

    def close(self) -> None:
        """Write everything that is pending, and release files and connections."""


class MetricLogger(Logger):
    """Base class of loggers that store scalar metrics only.

    Steps and evaluations are logged as metrics `train/NAME` and `evaluation/NAME`. Other events are
    ignored.
    """

    def log_event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            values = {f"train/{name}": event[name] for name in _STEP_METRICS if name in event}
            self.log(event["step"], values)
        elif kind == "evaluation":
            names = [name for name in event if name not in NOT_METRICS]
            self.log(event["step"], {f"evaluation/{name}": float(event[name]) for name in names})


class RunLogger:
    """Fan-out to several loggers; a logger that cannot write raises `RunError`.

    Without loggers, as on ranks other than 0, every method returns at once.

    Args:
        loggers: the loggers.
        run: run directory. After a move, removal or replacement of the directory nothing is
            written: TensorBoard and trackers open their files by path.
    """

    def __init__(self, loggers: Sequence[Logger], run: HeldFolder | None = None) -> None:
        self._loggers = loggers
        self._run = run

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with write_errors(OSError):
            if self._run is not None:
                self._run.require_in_place()
            yield

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved recipe."""
        with self._writing():
            for logger in self._loggers:
                logger.log_config(config)

    def log_event(self, kind: str, **fields: Any) -> None:
        """Log one event."""
        with self._writing():
            for logger in self._loggers:
                logger.log_event({"event": kind, **fields})

    def log_progress(self, label: str, done: int, total: int) -> None:
        """Show progress that is no event, such as the batches of an evaluation, on the terminal."""
        with write_errors(OSError):
            for logger in self._loggers:
                show = getattr(logger, "log_progress", None)  # which loggers may have
                if show is not None:
                    show(label, done, total)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Log a failure, and close every logger.

        A write error is raised, or added as a note to the error of the block.
        """
        if error is not None and not is_exit(error):
            # The error of the block is the cause: one of a logger must not replace that.
            try:
                self.log_event("failure", **failure_fields(error))
            except RunError as failure:
                # Otherwise both are the same failure: the directory is elsewhere.
                if not isinstance(error, RunMovedError):
                    error.add_note(str(failure))
        try:
            # The stack closes all of them, although one fails.
            with write_errors(OSError), ExitStack() as stack:
                for logger in self._loggers:
                    stack.callback(logger.close)
        except RunError as failure:
            if error is None:
                raise
            error.add_note(str(failure))


def is_exit(error: BaseException) -> bool:
    """Return whether an exception ends a script without a failure, as `sys.exit()` does."""
    return isinstance(error, SystemExit) and not error.code


def failure_fields(error: BaseException) -> dict[str, Any]:
    """Return `code`, `exit_code` and `text` of an exception that ends a run."""
    if isinstance(error, SamestepError):
        text = error.value.partition("\n")[0]
        return {"code": error.code, "exit_code": error.exit_code, "text": text}
    if isinstance(error, KeyboardInterrupt):
        return {"code": "E_STOPPED", "exit_code": EXIT_STOPPED, "text": "interrupted"}
    text = f"{class_name(error)}: {message_of(error)}".partition("\n")[0]
    return {"code": "E_RANK_FAILED", "exit_code": EXIT_FAILED, "text": text}


@contextmanager
def write_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise exceptions of these types as `RunError`."""
    try:
        yield
    except kinds as error:
        raise RunError(
            f"a logger cannot write: {getattr(error, 'strerror', None) or error}",
            expected="loggers can write to the run directory, the terminal and their servers",
            fix="free disk space, check the terminal, or select other loggers with --loggers",
            code="E_LOG_WRITE",
        ) from error


class JsonlLogger(Logger):
    """Appends events to a file, one JSON object per line, with the time in seconds since 1970.

    A resumed run appends to the same file. If a step occurs twice, the later line is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.log_event({"event": "metrics", "step": step, "values": values})

    def log_event(self, event: Event) -> None:
        with disk_operations.run("write", self._path):
            if self._file is None:
                # By lines: `samestep top` reads the file during the run.
                self._file = open(  # noqa: SIM115 - closed by `close`
                    self._path, "a", buffering=1, encoding="utf-8", opener=regular_file
                )
                if ends_mid_line(self._path):  # an earlier process was killed during a write
                    self._file.write("\n")
            self._file.write(to_json_line({"time": round(time.time(), 3), **event}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def ends_mid_line(path: Path) -> bool:
    """Return whether the last line of a file is incomplete."""
    with open(path, "rb", opener=regular_file) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        return file.read(1) not in (b"", b"\n")


def to_json_line(value: Mapping[str, Any]) -> str:
    """Return JSON on one line, with strings such as `"nan"` for NaN and infinities."""
    # `json` would write NaN, which other languages cannot parse.
    return json.dumps(_encodable(value), allow_nan=False)


def to_json(value: Mapping[str, Any]) -> str:
    """Return indented JSON, with strings for NaN and infinities as in `to_json_line`."""
    return json.dumps(_encodable(value), allow_nan=False, indent=1) + "\n"


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None, as for a line cut by a kill or a full disk."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return None


def _encodable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _encodable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def format_metric(name: str, value: float) -> str:
    """Format a metric: losses and perplexity with digits, samples as integer, others in percent."""
    if name == "samples":
        return f"{value:,.0f}"
    if name == "perplexity":
        return f"{value:,.2f}"
    if name == "loss" or name.startswith("loss_"):
        return f"{value:.4f}"
    return f"{value:.2%}"
