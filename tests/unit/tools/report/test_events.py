"""Events of a run, and JSON-lines files that a kill has cut."""

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from samestep.tools.report.events import DATA_SHARE, EventLog, JsonLines
from samestep.tools.run_lines import parse_count, parse_finite, parse_number


def log_of(path: Path, events: list[dict[str, Any]], batch_size: float | None = 32) -> EventLog:
    lines = [json.dumps({"time": 100.0 + number, **event}) for number, event in enumerate(events)]
    path.write_text("\n".join(lines) + "\n")
    return EventLog(path, batch_size)


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "step_in_epoch": number,
        "steps_in_epoch": 10,
        "loss": 1.0 / number,
        "lr": 0.1,
        "grad_norm": None,
        "skipped": False,
        "samples_per_second": 320.0,
        "data_seconds": 0.02,
        **changes,
    }


def identity(times: numpy.ndarray) -> numpy.ndarray:
    return times


def values(log: EventLog, curve: str) -> list[float]:
    return list(log.curves[curve].series(identity).values)


def test_curves_of_steps(tmp_path: Path) -> None:
    log = log_of(tmp_path / "e", [step(1), step(2, loss="nan", skipped=True), step(3, loss="inf")])
    loss = values(log, "loss")
    assert loss[0] == 1.0
    assert numpy.isnan(loss[1])
    assert numpy.isinf(loss[2])
    assert values(log, "grad_norm") == []
    assert (log.step, log.steps_in_epoch, log.skipped_steps, log.end) == (3, 10, {2}, None)


def test_share_of_a_step_spent_waiting_for_data(tmp_path: Path) -> None:
    # 32 samples at 320 per second take 0.1 s, with 0.02 s of waiting. The last batch of an epoch can be smaller.
    log = log_of(tmp_path / "e", [step(9), step(10)])
    assert values(log, DATA_SHARE) == pytest.approx([0.2])
    assert values(log_of(tmp_path / "e", [step(1, steps_in_epoch=1)]), DATA_SHARE) == pytest.approx([0.2])
    assert values(log_of(tmp_path / "e", [step(1)], None), DATA_SHARE) == []


def test_resumed_run_extends_the_curves(tmp_path: Path) -> None:
    events = [step(1), step(2), step(3, skipped=True), {"event": "resume", "step": 2}, step(3), {"event": "end"}]
    log = log_of(tmp_path / "e", events)
    assert len(values(log, "loss")) == 3
    assert log.resumed == [(102.0, 103.0, 2)]
    assert log.skipped_steps == set()
    assert log.end is not None


def test_resumed_run_has_not_ended(tmp_path: Path) -> None:
    events = [step(1), {"event": "end", "stopped": True}, {"event": "resume", "step": 1}, step(2)]
    assert log_of(tmp_path / "e", events).end is None


def test_resume_drops_the_values_of_later_steps(tmp_path: Path) -> None:
    """Steps of a loop are logged at a bounded rate, so repeated ones have other numbers."""
    evaluation = {"event": "evaluation", "loss": 0.5}
    events = [
        *(step(1), {**evaluation, "step": 2}, step(4, skipped=True), {**evaluation, "step": 4}),
        {"event": "metrics", "step": 3, "values": {"norm": 1.0}},
        {"event": "resume", "step": 2},
        *(step(3), step(5)),
        {"event": "metrics", "step": 5, "values": {"norm": 2.0, "text": "x"}},
    ]
    log = log_of(tmp_path / "e", events)
    assert log.curves["loss"].series(identity).steps.tolist() == [1, 3, 5]
    assert log.metrics["loss"].series(identity).steps.tolist() == list(log.evaluations) == [2]
    assert list(log.logged) == ["norm"]
    assert log.logged["norm"].series(identity).values.tolist() == [2.0]
    assert log.skipped_steps == set()


def test_events_of_a_custom_loop(tmp_path: Path) -> None:
    events = [
        {"event": "config", "config": {"batch_size": 64}},
        step(1),
        {"event": "evaluation", "step": 1, "accuracy": 0.5},
        {"event": "evaluation", "step": 1, "accuracy_2": 0.25},
        {"event": "checkpoint", "step": 1, "is_best": True},
        {"event": "failure", "code": "E_NONFINITE"},
    ]
    log = log_of(tmp_path / "e", events, None)
    assert log.config == {"batch_size": 64}
    assert values(log, DATA_SHARE) == pytest.approx([0.1])
    evaluation = log.evaluations[1]
    assert (evaluation["accuracy"], evaluation["accuracy_2"], evaluation["is_best"]) == (0.5, 0.25, True)
    assert (log.end or {})["code"] == "E_NONFINITE"


def test_evaluations_by_step_and_metric(tmp_path: Path) -> None:
    first = {"event": "evaluation", "step": 5, "epoch": 1, "epochs": 2, "is_best": True, "loss": 0.5, "accuracy": 0.9}
    log = log_of(tmp_path / "e", [first, {**first, "loss": 0.4}, {**first, "step": 10, "loss": "nan"}])
    assert list(log.metrics) == ["loss", "accuracy"]
    assert log.metrics["loss"].series(identity).values.tolist()[0] == 0.4
    assert log.evaluations[5]["loss"] == 0.4


def test_invalid_events_are_ignored(tmp_path: Path) -> None:
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
    assert values(log, "loss") == []
    assert (len(log.times), log.unreadable) == (2, 5)


def read(path: Path, content: bytes) -> tuple[list[object], int]:
    path.write_bytes(content)
    lines = JsonLines(path)
    return list(lines), lines.unreadable


def test_cut_line_at_the_end_is_skipped(tmp_path: Path) -> None:
    assert read(tmp_path / "a", b'{"time": 1}\n{"time": 2, "st') == ([{"time": 1}], 1)


def test_line_appended_to_a_cut_line_is_read(tmp_path: Path) -> None:
    content = b'{"time": 1}\n{"time": 2, "st{"time": 3, "event": "resume"}\n{"time": 4}\n'
    assert read(tmp_path / "a", content) == ([{"time": 1}, {"time": 3, "event": "resume"}, {"time": 4}], 1)


def test_empty_lines_and_zeros_are_not_counted(tmp_path: Path) -> None:
    assert read(tmp_path / "a", b'\n{"time": 1}\n\0\0\0\0\n\n') == ([{"time": 1}], 0)


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b"\xff\xfe{", b"[" * 100_000, b'{"a": ' * 100_000])
def test_line_without_an_object_is_skipped(line: bytes, tmp_path: Path) -> None:
    assert read(tmp_path / "a", line + b'\n{"time": 1}\n') == ([{"time": 1}], 1)


def test_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(JsonLines(tmp_path / "none")) == []


def test_numbers_of_events() -> None:
    assert [parse_number(value) for value in (1, 2.5, "inf", "-inf", "7", None, True, [1])] == [
        1.0,
        2.5,
        math.inf,
        -math.inf,
        None,
        None,
        None,
        None,
    ]
    assert math.isnan(parse_number("nan") or 0.0)
    assert parse_number(10**400) is None
    assert [parse_finite(value) for value in (1, "nan", "inf", None)] == [1.0, None, None, None]
    assert [parse_count(value) for value in (0, 7, -1, 2.0, True, "7", 2**60)] == [0, 7, None, None, None, None, None]
