"""The events of a run, and the file that keeps them: one JSON object a line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from samestep.errors import RunError

Event = Mapping[str, Any]


class Listener(Protocol):
    """Hears the events of a run."""

    def hear(self, event: Event) -> None:
        """Take one event: `event["event"]` is its kind, the rest depends on the kind (`docs/runs.md`)."""

    def close(self) -> None:
        """The run is over."""


class EventFile:
    """Appends events to `events.jsonl`, with the time of day in seconds since 1970.

    A resumed run appends too; where a step is there twice, the later line counts.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def hear(self, event: Event) -> None:
        self._file.write(one_line({"time": round(time.time(), 3), **event}) + "\n")

    def close(self) -> None:
        self._file.close()


def one_line(value: Mapping[str, Any]) -> str:
    """`value` as one line of JSON, which has no NaN and no infinity: their names stand for them."""
    return json.dumps(_in_json(value), allow_nan=False)


def several_lines(value: Mapping[str, Any]) -> str:
    """`value` as JSON that people read too; NaN and infinity as in `one_line`."""
    return json.dumps(_in_json(value), allow_nan=False, indent=1) + "\n"


def read_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none, as in a line that a kill or a full disk has cut."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Recorder:
    """Tells every listener; with none, in ranks other than 0, telling costs nothing."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def tell(self, kind: str, **facts: Any) -> None:
        """Pass on one event.

        Raises:
            RunError: it cannot be written.
        """
        with _named_failure():
            for listener in self._listeners:
                listener.hear({"event": kind, **facts})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close every listener; what cannot be written now is told where nothing else went wrong."""
        try:
            with _named_failure(), ExitStack() as stack:
                for listener in self._listeners:
                    stack.callback(listener.close)
        except RunError as failure:
            if error is None:
                raise
            error.add_note(str(failure))


@contextmanager
def _named_failure() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"what the run has to tell cannot be written: {error.strerror or error}",
            rule="events and curves go to the run's folder, and progress to the terminal",
            do="make room on the disk, or see who closed the terminal",
        ) from error
