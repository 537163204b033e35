"""What events tell of a run."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from samestep.tools.report.event_log import DATA_SHARE, EventLog


def log_of(path: Path, events: list[dict[str, Any]], batch_size: float | None = 32) -> EventLog:
    lines = [json.dumps({"time": 100.0 + number, **event}) for number, event in enumerate(events)]
    path.write_text("\n".join(lines) + "\n")
    return EventLog(path, batch_size)


def step(number: int, **others: Any) -> dict[str, Any]:
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
        **others,
    }


def same(times: numpy.ndarray) -> numpy.ndarray:
    return times


def values(log: EventLog, curve: str) -> list[float]:
    found: list[float] = log.curves[curve].series(same).values.tolist()
    return found


def test_curves_of_steps(tmp_path: Path) -> None:
    log = log_of(tmp_path / "e", [step(1), step(2, loss="nan", skipped=True), step(3, loss="inf")])
    loss = values(log, "loss")
    assert loss[0] == 1.0
    assert numpy.isnan(loss[1])
    assert numpy.isinf(loss[2])
    assert values(log, "grad_norm") == []
    assert (log.step, log.steps_in_epoch, log.skipped_steps, log.end) == (3, 10, {2}, None)


def test_share_of_waiting_is_of_the_step(tmp_path: Path) -> None:
    # 32 samples at 320 a second take 0.1 s, of which 0.02 s were waited; the last batch may be short.
    log = log_of(tmp_path / "e", [step(9), step(10)])
    assert values(log, DATA_SHARE) == pytest.approx([0.2])
    assert values(log_of(tmp_path / "e", [step(1, steps_in_epoch=1)]), DATA_SHARE) == pytest.approx([0.2])
    assert values(log_of(tmp_path / "e", [step(1)], None), DATA_SHARE) == []


def test_resumed_run_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    events = [step(1), step(2), step(3, skipped=True), {"event": "resume", "step": 2}, step(3), {"event": "end"}]
    log = log_of(tmp_path / "e", events)
    assert len(values(log, "loss")) == 3
    assert log.resumed == [(102.0, 103.0, 2)]
    assert log.skipped_steps == set()
    assert log.end is not None


def test_run_that_goes_on_has_not_ended(tmp_path: Path) -> None:
    events = [step(1), {"event": "end", "stopped": True}, {"event": "resume", "step": 1}, step(2)]
    assert log_of(tmp_path / "e", events).end is None


def test_evaluations_by_step_and_by_metric(tmp_path: Path) -> None:
    first = {"event": "evaluation", "step": 5, "epoch": 1, "epochs": 2, "is_best": True, "loss": 0.5, "accuracy": 0.9}
    log = log_of(tmp_path / "e", [first, {**first, "loss": 0.4}, {**first, "step": 10, "loss": "nan"}])
    assert list(log.metrics) == ["loss", "accuracy"]
    assert log.metrics["loss"].series(same).values.tolist()[0] == 0.4
    assert log.evaluations[5]["loss"] == 0.4


def test_events_of_another_form_do_no_harm(tmp_path: Path) -> None:
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
    assert len(log.times) == 6
