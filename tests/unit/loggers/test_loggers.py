"""Loggers of metrics and events."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import samestep
from helpers.system import Running, events, here, until
from helpers.terminal import Screen
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import RunOptions
from samestep.config.validation import require_package
from samestep.errors import EXIT_INPUT, InputError, RecipeError, RunError
from samestep.loggers.logger import Event, JsonlLogger, RunLogger, parse_json_line
from samestep.loggers.progress import ProgressLogger, evaluation_line
from samestep.loggers.trackers import TensorBoardLogger, create_loggers
from samestep.recipes.builder import build, start_world
from samestep.recipes.checkpoints import RecipeCheckpoints
from samestep.recipes.events import StepTimer, TrainingEvents
from samestep.recipes.recipe_files import load_recipe, recipe_data
from samestep.recipes.run import fit
from samestep.session import start

TESTS = Path(__file__).parents[2]
PACKAGE = TESTS / "helpers" / "logger_package"
RECIPE = TESTS / "helpers" / "recorded.yaml"

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
    "skipped_steps": 0,
    "samples_per_second": 1234.5,
    "loss": 0.5,
    "samples": 360,
    "accuracy": 0.9125,
}


class MemoryLogger:
    """Stores the calls."""

    def __init__(self) -> None:
        self.config: Mapping[str, Any] = {}
        self.metrics: list[tuple[int, Mapping[str, float]]] = []
        self.events: list[Event] = []
        self.is_closed = False

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.append((step, values))

    def log_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.is_closed = True


class FullDisk(MemoryLogger):
    """Fails to write."""

    def log_event(self, event: Event) -> None:
        raise OSError(28, "No space left on device")

    close = lambda self: self.log_event({})  # noqa: E731


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- all loggers ---


def test_run_logger_passes_everything_to_every_logger() -> None:
    loggers = [MemoryLogger(), MemoryLogger()]
    with RunLogger(loggers) as run_logger:
        run_logger.log_config({"epochs": 3})
        run_logger.log_event("note", text="a")
        run_logger.log_event("end", step=1)
    for logger in loggers:
        assert logger.config == {"epochs": 3}
        assert logger.events == [{"event": "note", "text": "a"}, {"event": "end", "step": 1}]
        assert logger.is_closed


def test_write_error_ends_the_run_after_all_loggers_are_closed() -> None:
    other = MemoryLogger()
    with pytest.raises(RunError, match="No space left") as failure, RunLogger([FullDisk(), other]):
        pass
    assert failure.value.code == "E_LOG_WRITE"
    assert other.is_closed
    with pytest.raises(RunError, match="No space left"):
        RunLogger([FullDisk()]).log_event("note", text="a")


def test_failure_is_the_last_event() -> None:
    logger = MemoryLogger()
    with pytest.raises(InputError), RunLogger([logger]):
        raise InputError("a value", code="E_VALUE")
    assert logger.events == [{"event": "failure", "code": "E_VALUE", "exit_code": EXIT_INPUT, "text": "a value"}]
    assert logger.is_closed


def test_write_error_does_not_hide_the_first_error() -> None:
    with pytest.raises(ZeroDivisionError) as failure, RunLogger([FullDisk()]):
        1 / 0  # noqa: B018
    assert "No space left" in failure.value.__notes__[0]


def test_missing_package_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no_such_package") as failure:
        require_package("the logger wandb", "no_such_package", "wandb")
    assert failure.value.code == "E_NOT_INSTALLED"


def log_in_world(path: Path) -> tuple[list[int], list[tuple[int, Mapping[str, float]]], bool]:
    memory = MemoryLogger()
    with start(device="cpu", loggers=[memory, JsonlLogger(path)]) as world:
        world.log(3, {"rank": world.rank})
        calls = samestep.all_gather(len(memory.metrics), world)
    return calls, memory.metrics, memory.is_closed


def test_world_logs_on_rank_0_only_and_closes_the_loggers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    calls, metrics, is_closed = samestep.launch(log_in_world, path, processes=2)
    assert (calls, metrics, is_closed) == ([1, 0], [(3, {"rank": 0})], True)
    (line,) = read_lines(path)
    assert (line["event"], line["step"], line["values"]) == ("metrics", 3, {"rank": 0})


# --- JSON lines ---


def test_jsonl_appends_and_flushes_every_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        logger = JsonlLogger(path)
        logger.log_event({"event": "step", "step": step})
        assert read_lines(path)[-1]["step"] == step
        logger.close()
    lines = read_lines(path)
    assert [list(line) for line in lines] == [["time", "event", "step"]] * 2
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["time"] > 1.6e9 for line in lines)


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_jsonl_writes_non_finite_numbers_as_strings(tmp_path: Path, value: float, text: str) -> None:
    logger = JsonlLogger(tmp_path / "events.jsonl")
    logger.log_event({"event": "step", "loss": value})
    logger.close()
    line = (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert json.loads(line, parse_constant=pytest.fail)["loss"] == text


def test_parse_json_line_returns_objects_only() -> None:
    assert parse_json_line(b'{"a": 1}') == {"a": 1}
    for broken in (b"", b'{"a": ', b"[1]", b"17", b"\xff\xfe", b'{"time": 17{"time": 18}'):
        assert parse_json_line(broken) is None


# --- TensorBoard ---


def scalars(path: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside TensorBoard
def test_tensorboard_drops_lost_steps_of_a_resumed_run(tmp_path: Path) -> None:
    first = TensorBoardLogger(tmp_path)
    for step in range(1, 6):
        first.log_event({**STEP, "step": step, "loss": 1.0})
    first.close()
    second = TensorBoardLogger(tmp_path, 3)
    for step in range(4, 7):
        second.log_event({**STEP, "step": step, "loss": 2.0})
    second.log_event({**EVALUATION, "step": 6})
    second.log(6, {"my/metric": 4.0})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert scalars(tmp_path, "evaluation/accuracy") == [(6, pytest.approx(0.9125))]
    assert scalars(tmp_path, "my/metric") == [(6, 4.0)]


# --- Weights & Biases ---

# The package starts threads and processes, and sends usage statistics unless these variables are set.
WITHOUT_TELEMETRY = {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}


def run_python(folder: Path, code: str, *arguments: str) -> None:
    environment = {**os.environ, **WITHOUT_TELEMETRY}
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=environment, check=True, timeout=120)


TWO_PARTS = """
import json, sys
from pathlib import Path
from samestep.loggers.trackers import WandbLogger
step, evaluation = sys.argv[1:]
for resume, number in ((False, 3), (True, 4)):
    logger = WandbLogger(Path("first"), resume=resume)
    logger.log_config({"epochs": 3, "optimizer": {"name": "sgd", "options": {"lr": 0.1}}})
    logger.log_event(json.loads(step) | {"step": number})
    logger.log_event(json.loads(evaluation) | {"step": number})
    logger.log(number, {"my/metric": float("nan")})
    logger.close()
"""


@pytest.mark.slow
def test_wandb_writes_an_offline_run_and_resumes_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "first").mkdir()
    run_python(tmp_path, TWO_PARTS, json.dumps(STEP), json.dumps(EVALUATION))
    files = list((tmp_path / "first" / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = (tmp_path / "first" / "wandb" / "run-id.txt").read_text(encoding="utf-8")
    assert len(files) == 2
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    for path in files:
        content = path.read_bytes()
        assert all(text in content for text in (b"train/loss", b"evaluation/accuracy", b"my/metric", b"optimizer"))


# --- terminal ---


def test_progress_without_a_terminal_prints_evaluations_notes_and_metrics() -> None:
    out = io.StringIO()
    logger = ProgressLogger(Console(file=out))
    note = "[red]a note[/red] in brackets " + "x" * 100
    logger.log_event({"event": "step", "step": 1})  # of a loop of one's own, without a loss
    logger.log_event({"event": "note", "text": note})
    logger.log_event({"event": "resume", "step": 1, "text": "resuming after step 1"})
    logger.log_event(STEP)
    logger.log_event(EVALUATION)
    logger.log_event({"event": "checkpoint", "step": 4, "path": "step-4", "is_best": True})
    logger.log(5, {"accuracy": 0.5})
    logger.close()
    assert out.getvalue().splitlines() == [
        note,
        "resuming after step 1",
        evaluation_line(EVALUATION),
        "step 5  accuracy 0.5",
    ]


def test_progress_bar_shows_evaluations() -> None:
    out = io.StringIO()
    logger = ProgressLogger(Console(file=out, force_terminal=True, width=100))
    logger.log_event(STEP)
    until(lambda: "3/4" in out.getvalue(), "a picture; there are four a second", 60)
    logger.log_event({**STEP, "step": 4, "step_in_epoch": 4})
    logger.log_progress("evaluation", 7, 40)
    logger.close()
    screen = Screen()
    screen.feed(out.getvalue())
    lines = [line for frame in screen.frames for line in frame]
    assert any("epoch 1" in line and "3/4" in line and "loss 0.5000" in line for line in lines)
    assert any("evaluation" in line and " 7/40" in line for line in lines)
    assert any("epoch 1" in line and "4/4" in line for line in lines)
    assert not any(" 0/" in line for line in lines)


def test_columns_of_epochs_are_aligned() -> None:
    first = evaluation_line({**EVALUATION, "train_accuracy": 0.05, "accuracy": 1.0, "loss": 12.5})
    second = evaluation_line({**EVALUATION, "epoch": 10, "train_accuracy": 0.912, "samples_per_second": 9.0})
    for name in ("train loss", "val loss", "train accuracy", "val accuracy", "samples/s", "best"):
        assert first.index(name) == second.index(name)
    assert "train accuracy   5.00%  val accuracy 100.00%" in first


# --- timer ---


def test_timer_counts_the_wait_before_a_step_and_local_samples() -> None:
    timer = StepTimer()
    with timer.waits.wait():
        pass
    for local_samples in (3, 5):
        with timer.step(10, local_samples):
            pass
    assert timer.local_samples == 8
    assert 10 / timer.last_speed > timer.waits.last > 0


# --- loggers of other packages, by entry points ---


def test_logger_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    options = RunOptions(loggers=("jsonl", "csv"))
    _, logger = create_loggers(options.loggers, tmp_path)
    logger.log_event({"event": "evaluation", "step": 1, "epoch": 1, "loss": 0.5})
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "1,0.5\n"
    with pytest.raises(RecipeError, match="unknown logger 'csvv'") as error:
        RunOptions(loggers=("csvv",))
    assert "wandb, csv" in error.value.expected


@pytest.mark.slow
def test_run_with_the_logger_of_a_package(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": f"{PACKAGE}:{TESTS.parent / 'src'}:{TESTS}"}
    options = ("--loggers", "jsonl,csv", "--name", "a", "--processes", 2)
    with Running("train", RECIPE, "epochs=2", *options, cwd=tmp_path, variables=variables) as running:
        done = running.wait(120)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "a"
    lines = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [float(line.partition(",")[2]) for line in lines] == [one["loss"] for one in events(run, "evaluation")]


# --- training ---


@pytest.mark.parametrize("loggers", ["jsonl", "tensorboard,progress"])
def test_loggers_option_selects_the_loggers(tmp_path: Path, capfd: pytest.CaptureFixture[str], loggers: str) -> None:
    assert here("train", RECIPE, "--name", "a", "epochs=1", "--loggers", loggers, cwd=tmp_path) == 0
    out = capfd.readouterr().out
    files = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert ("events.jsonl" in files) == ("jsonl" in loggers)
    assert ("tensorboard" in files) == ("tensorboard --logdir" in out) == ("tensorboard" in loggers)


def test_unknown_logger_is_refused_before_a_run_is_created(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here("train", "digits", "--loggers", "jsonl,paper", cwd=tmp_path) == EXIT_INPUT
    assert "'paper' [E_UNKNOWN_NAME]" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_trainer_logs_config_and_events_and_closes_the_loggers(tmp_path: Path) -> None:
    logger = samestep.launch(train_with_memory_logger, tmp_path, processes=1)
    assert logger.config["epochs"] == 1
    kinds = [event["event"] for event in logger.events]
    assert kinds[:2] == ["step", "step"]
    assert kinds[-3:] == ["evaluation", "checkpoint", "end"]
    assert logger.is_closed


def train_with_memory_logger(folder: Path) -> MemoryLogger:
    recipe, options = load_recipe("digits", ["epochs=1", "batch_size=512"]), RunOptions(device="cpu")
    logger = MemoryLogger()
    with start_world(recipe, options) as world:
        built = build(recipe, options, world)
        with RunLogger([logger]) as log:
            log.log_config(recipe_data(recipe))
            checkpoints = RecipeCheckpoints(CheckpointFolder(folder, 2), built, recipe, options, log)
            events = TrainingEvents(log, built, recipe.epochs, options)
            fit(built, recipe.epochs, checkpoints, events)
            events.log_end(stopped=False)
    return logger
