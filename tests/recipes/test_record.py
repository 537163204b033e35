"""What a run leaves behind and shows."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from samestep.record.curves import Curves
from samestep.record.environment import append_environment
from samestep.record.events import Event, EventFile, Recorder, one_line, read_line, several_lines
from samestep.record.progress import ProgressLine, epoch_line
from samestep.record.stopwatch import Stopwatch

STEP = {
    "event": "step",
    "step": 3,
    "epoch": 0,
    "step_in_epoch": 3,
    "steps_in_epoch": 4,
    "loss": 0.5,
    "lr": 0.1,
    "grad_norm": 2.0,
    "skipped": False,
    "samples_per_second": 1234.5,
    "data_seconds": 0.001,
}
EVALUATION = {
    "event": "evaluation",
    "step": 4,
    "epoch": 1,
    "epochs": 12,
    "train_loss": 0.75,
    "is_best": True,
    "samples_per_second": 1234.5,
    "loss": 0.5,
    "samples": 360,
    "accuracy": 0.9125,
}


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.is_closed = False

    def hear(self, event: Event) -> None:
        self.told.append(event)

    def close(self) -> None:
        self.is_closed = True


def test_every_listener_hears_everything() -> None:
    listeners = [Heard(), Heard()]
    with Recorder(listeners) as recorder:
        recorder.tell("note", text="a")
        recorder.tell("end", step=1)
    for listener in listeners:
        assert listener.told == [{"event": "note", "text": "a"}, {"event": "end", "step": 1}]
        assert listener.is_closed


def test_event_file_is_appended_to_and_readable_after_each_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        file = EventFile(path)
        file.hear({"event": "step", "step": step})
        assert json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"] == step
        file.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["time"] > 1.6e9 for line in lines)


@pytest.mark.parametrize(("value", "written"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_numbers_that_json_has_not_are_written_by_name(tmp_path: Path, value: float, written: str) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    file.hear({"event": "step", "loss": value})
    file.close()
    text = (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == written


@pytest.mark.parametrize("write", [one_line, several_lines])
def test_no_number_is_too_deep_for_json(write: Callable[[dict[str, Any]], str]) -> None:
    text = write({"rows": [{"loss": float("nan")}, (1.5, float("inf"))]})
    assert json.loads(text, parse_constant=pytest.fail) == {"rows": [{"loss": "nan"}, [1.5, "inf"]]}


def test_only_objects_are_read() -> None:
    assert read_line(b'{"a": 1}') == {"a": 1}
    for broken in (b"", b'{"a": ', b"[1]", b"17", b"\xff\xfe", b'{"time": 17{"time": 18}'):
        assert read_line(broken) is None


def scalars(path: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(path))
    curves.Reload()
    return [(point.step, point.value) for point in curves.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_curves_of_a_resumed_run_drop_the_steps_that_were_lost(tmp_path: Path) -> None:
    first = Curves(tmp_path, 0)
    for step in range(1, 6):
        first.hear({**STEP, "step": step, "loss": 1.0})
    first.close()
    second = Curves(tmp_path, 3)
    for step in range(4, 7):
        second.hear({**STEP, "step": step, "loss": 2.0})
    second.hear({**EVALUATION, "step": 6})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert scalars(tmp_path, "evaluation/accuracy") == [(6, pytest.approx(0.9125))]


def test_curves_without_numbers_write_no_file(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "tensorboard", 0)
    curves.hear({"event": "note", "text": "a"})
    curves.close()
    assert not (tmp_path / "tensorboard").exists()


def test_environment_has_an_entry_for_each_start(tmp_path: Path) -> None:
    for processes in (1, 3):
        append_environment(tmp_path / "environment.json", {"processes": processes})
    entries = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert [entry["processes"] for entry in entries] == [1, 3]
    assert all(entry["started"] and entry["samestep"] for entry in entries)


def test_epoch_line_says_it_all_in_one_line() -> None:
    assert epoch_line(EVALUATION) == (
        "epoch  1/12  train loss 0.7500  loss 0.5000  accuracy 91.25%  1,234 samples/s  best"
    )
    assert not epoch_line({**EVALUATION, "is_best": False}).endswith("best")


def test_without_a_terminal_epochs_and_notes_are_lines_and_steps_are_silent() -> None:
    out = io.StringIO()
    line = ProgressLine(Console(file=out))
    line.hear({"event": "note", "text": "[red]a note[/red] in brackets " + "x" * 100})
    line.hear(STEP)
    line.hear(EVALUATION)
    line.hear({"event": "checkpoint", "step": 4, "path": "step-4", "is_best": True})
    line.close()
    lines = out.getvalue().splitlines()
    assert lines == ["[red]a note[/red] in brackets " + "x" * 100, epoch_line(EVALUATION)]


def test_stopwatch_tells_waiting_from_training() -> None:
    watch = Stopwatch()
    assert (watch.speed, watch.last_wait, watch.last_speed) == (0.0, 0.0, 0.0)
    with watch.waiting():
        pass
    with watch.training(10):
        pass
    assert watch.last_wait > 0
    assert watch.speed == watch.last_speed > 0
    assert watch.elapsed > watch.last_wait


def test_stopwatch_lets_errors_pass() -> None:
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.training(10):
        1 / 0  # noqa: B018
    assert watch.speed == 0.0


def test_stopwatch_counts_waits_that_go_on_and_own_samples() -> None:
    watch = Stopwatch()
    with watch.waiting():
        first, second = watch.waited, watch.waited
        assert 0 <= first < second
    after = watch.waited
    assert after == watch.waited == pytest.approx(watch.last_wait, abs=1e-4)
    with pytest.raises(ZeroDivisionError), watch.waiting():
        1 / 0  # noqa: B018
    assert watch.waited == watch.waited > after
    for own in (3, 5):
        with watch.training(10, own=own):
            pass
    assert watch.own_samples == 8
