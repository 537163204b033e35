"""Content of a run's directory: events, and JSON-lines files that a kill has cut."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import START, step_event
from samestep.tools.run_log import EventLog, read_json_lines


def log_of(path: Path, events: list[dict[str, Any]]) -> EventLog:
    lines = [json.dumps({"time": START + number, **event}) for number, event in enumerate(events)]
    path.write_text("\n".join(lines) + "\n")
    return EventLog(read_json_lines(path))


def step(number: int, **changes: Any) -> dict[str, Any]:
    return step_event(number, START + number, **changes)


def curve(log: EventLog, name: str) -> dict[float, float]:
    return dict(log.curves[name])


def test_curves_of_steps_and_logged_values(tmp_path: Path) -> None:
    logged = {"event": "metrics", "step": 3, "values": {"tenth": 0.3, "text": "a"}}
    events = [step(1, loss=1.0), step(2, loss="nan"), step(3, loss="inf"), logged]
    log = log_of(tmp_path / "e", events)
    values = curve(log, "loss")
    assert (values[1], values[3], log.step, log.end) == (1.0, math.inf, 3, None)
    assert math.isnan(values[2])
    assert curve(log, "tenth") == {3: 0.3}
    assert "text" not in log.curves


def test_resume_drops_the_values_of_later_steps(tmp_path: Path) -> None:
    """Steps of a loop are logged at a bounded rate, so repeated ones have other numbers."""
    evaluation = {"event": "evaluation", "loss": 0.5}
    checksum = {"event": "checksum", "checksum": "ab"}
    events = [
        step(2, loss=2.0),
        {**evaluation, "step": 2},
        {**checksum, "step": 2},
        step(4, loss=4.0),
        {**evaluation, "step": 4},
        {**checksum, "step": 4},
        {"event": "end", "stopped": True},
        {"event": "resume", "step": 2},
        step(3, loss=3.0),
        step(3, loss=3.5),
    ]
    log = log_of(tmp_path / "e", events)
    assert curve(log, "loss") == {2: 2.0, 3: 3.5}
    assert (list(log.evaluations), log.checksums, log.resumed) == ([2], {2: "ab"}, [2])
    assert log.end is None
    assert [text for _, text in log.notes] == ["stopped at step 4", "resume at step 2"]


def test_invalid_events_are_skipped(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"event": "step"},
        {"event": "step", "step": "7"},
        {"event": 7},
        {"event": "step", "step": 2**70},
        {"event": "evaluation", "step": 1, "accuracy": [1]},
        {"event": "note", "text": None},
        {"event": "step", "step": 1, "loss": 1.0, "time": "yesterday"},
    ]
    log = log_of(tmp_path / "e", events)
    assert curve(log, "loss") == {}
    assert list(log.evaluations) == [1]


@pytest.mark.parametrize(
    ("content", "objects"),
    [
        (b'{"time": 1}\n{"time": 2, "st', [1]),
        (b'{"time": 1}\n{"time": 2, "st{"time": 3}\n{"time": 4}\n', [1, 4]),
        (b'\n{"time": 1}\n\0\0\0\0\n\n', [1]),
        (b"[1, 2]\n7\n\xff\xfe{\n" + b"[" * 100_000 + b'\n{"time": 1}\n', [1]),
    ],
    ids=["cut line", "line appended to a cut line", "empty lines and zeros", "no objects"],
)
def test_json_lines(content: bytes, objects: list[int], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    assert [value["time"] for value in read_json_lines(tmp_path / "a")] == objects
    assert read_json_lines(tmp_path / "none") == []
