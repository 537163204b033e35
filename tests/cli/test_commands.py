"""Output and files of successful commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import samestep as package
from helpers.system import Done, Running, events, here, samestep, state_of, steps_saved, tree, weights
from helpers.terminal import open_terminal
from samestep.cli import commands as command_table
from samestep.cli.main import build_parser, main
from samestep.recipes.recipe_files import load_recipe, read_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests" / "helpers" / "recorded.yaml"
COMMANDS = ("train", "resume", "eval", "predict", "export", "run", "top")
SMALL = ("epochs=3", "model.options.width=8", "batch_size=256")
STEPS = 18  # of 1,437 samples, six an epoch
ENVIRONMENT = {
    "started",
    "sources",
    "samestep",
    "from_step",
    "processes",
    "strategy",
    "device",
    "visible_devices",
    "threads",
    "workers",
    "prefetch",
    "keep",
    "python",
    "remark",
    "torch",
    "cuda",
    "system",
}


def example_of(text: str) -> list[str]:
    match = re.search(r"^examples?: samestep (.*(?:\n\S.*)*)", text, re.MULTILINE)
    assert match, text
    return shlex.split(match[1])


def test_commands_are_parsed_without_torch() -> None:
    code = "import sys, samestep.cli.main\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"samestep {version('samestep')}\n"
    assert package.__version__ == version("samestep")


@pytest.mark.parametrize("command", command_table.COMMANDS)
def test_help_of_a_command_has_an_example_and_explains_every_option(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    if command == "run":  # its options end at the script
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
    else:
        assert main([command, "--help-all"]) == 0
    text = capsys.readouterr().out
    assert example_of(text)[0].rstrip(";") == command
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)(?: [A-Z=. \[\]]+| \{[\w,]+\})?(.*(?:\n {8,}.*)*)", text, re.MULTILINE)
    assert len(options) >= 2
    for option, explanation in options:
        assert explanation.strip(), option


@pytest.mark.long
@pytest.mark.slow
def test_examples_of_the_help_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (8, 8), 200).save(tmp_path / "picture.png")
    (tmp_path / "train.py").write_text("print(1)\n", encoding="utf-8")
    for command in COMMANDS:
        example = example_of(build_parser(command).format_help())
        assert here(*example, cwd=tmp_path) == 0, f"{example}\n{capsys.readouterr().err}"


# --- one run on three processes, without a terminal ---


class Trained:
    """A run, and the result of the command."""

    def __init__(self, folder: Path, done: Done) -> None:
        self.folder, self.done, self.run = folder, done, folder / "runs" / "a"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    done = samestep("train", "digits", "--processes", 3, "--name", "a", *SMALL, cwd=folder)
    assert done.code == 0, done.err
    return Trained(folder, done)


def test_epochs_are_printed_on_standard_error_and_the_summary_on_standard_output(trained: Trained) -> None:
    out, err = trained.done.out, trained.done.err
    small, evaluated, *lines = err.splitlines()
    assert small == "DigitsNet: some calls computed whole on every process: so small that messages would take longer"
    assert evaluated == "DigitsNet: calls divided between 3 processes"  # without sums of batch norm
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    evaluations = events(trained.run, "evaluation")
    for line, event in zip(lines, evaluations, strict=True):
        assert f"train loss {event['train_loss']:7.4f}  val loss {event['loss']:7.4f}" in line
        assert f"train accuracy {event['train_accuracy']:>7.2%}  val accuracy {event['accuracy']:>7.2%}" in line
        assert line.endswith("  best") == event["is_best"]
    assert f"{evaluations[-1]['accuracy']:.2%}" in out
    assert "360 samples" in out
    assert "samestep eval runs/a" in out


def test_output_without_a_terminal_has_no_control_characters_and_no_repetition(trained: Trained) -> None:
    for text in (trained.done.out, trained.done.err):
        assert not re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", text)
        repeated = [line for line, times in Counter(text.splitlines()).items() if times > 1]
        assert not repeated


def test_run_writes_the_documented_files(trained: Trained) -> None:
    assert {path.name for path in trained.run.iterdir()} == {
        "recipe.yaml",
        "data.json",
        "environment.json",
        "events.jsonl",
        "tensorboard",
        "checkpoints",
        "logs",
        "ranks",
        ".lock",
    }
    assert {path.name for path in (trained.run / "ranks").iterdir()} == {f"rank-{rank}.jsonl" for rank in range(3)}
    assert {path.name for path in (trained.run / "logs").iterdir()} == {"rank-1.log", "rank-2.log"}
    assert {path.name for path in (trained.run / "checkpoints" / "last").iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }
    assert {path.name for path in trained.folder.iterdir()} == {"runs"}


def test_resolved_recipe_is_the_recipe_with_the_overrides(trained: Trained) -> None:
    assert read_recipe(trained.run / "recipe.yaml") == load_recipe("digits", SMALL)
    assert state_of(trained.run)["recipe"]["epochs"] == 3


@pytest.mark.slow
def test_resolved_recipe_trained_again_gives_the_same_bits(tmp_path: Path) -> None:
    assert here("train", RECIPE, "--name", "a", "epochs=2", "step.seed=5", cwd=tmp_path) == 0
    first, again = (tmp_path / "runs" / name for name in ("a", "again"))
    assert here("train", first / "recipe.yaml", "--name", "again", "--processes", 4, cwd=tmp_path) == 0
    for which in ("last", "best"):
        assert weights(again, which) == weights(first, which)


def test_environment_describes_the_machine(trained: Trained) -> None:
    (entry,) = json.loads((trained.run / "environment.json").read_text(encoding="utf-8"))
    assert entry.keys() == ENVIRONMENT
    assert (entry["processes"], entry["from_step"], entry["samestep"]) == (3, 0, version("samestep"))


def documented_keys() -> dict[str, set[str]]:
    """Return the keys of each event from the table in the documentation."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.*`.*) \|$", (ROOT / "docs" / "reference" / "events.md").read_text("utf-8"), re.MULTILINE
    )
    return {kind: set(re.findall(r"`(\w+)`", keys)) | {"time", "event"} for kind, keys in rows}


def test_events_have_the_documented_keys(trained: Trained) -> None:
    lines = (trained.run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line, parse_constant=refuse) for line in lines]
    documented = documented_keys()
    assert [event["step"] for event in logged if event["event"] == "step"] == list(range(1, STEPS + 1))
    assert {"step", "evaluation", "checkpoint", "checksum", "end"} == {event["event"] for event in logged}
    for event in logged:
        metrics = {"train_accuracy", "accuracy"} if event["event"] == "evaluation" else set()
        assert event.keys() == documented[event["event"]] | metrics
    times = [event["time"] for event in logged]
    assert times == sorted(times)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by TensorBoard
def test_curves_hold_the_numbers_of_the_events(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(trained.run / "tensorboard"), size_guidance={"scalars": 0})
    curves.Reload()
    for tag, kind, key in (
        ("train/loss", "step", "loss"),
        ("train/lr", "step", "lr"),
        ("evaluation/loss", "evaluation", "loss"),
        ("evaluation/accuracy", "evaluation", "accuracy"),
    ):
        logged, points = events(trained.run, kind), curves.Scalars(tag)
        assert [point.step for point in points] == [event["step"] for event in logged]
        assert [point.value for point in points] == pytest.approx([event[key] for event in logged], rel=1e-6)


def test_best_checkpoint_is_the_one_with_the_best_metric(trained: Trained) -> None:
    evaluations = events(trained.run, "evaluation")
    best = max(evaluations, key=lambda event: event["accuracy"])  # the first of equal values
    assert state_of(trained.run, "best")["step"] == best["step"]
    assert state_of(trained.run)["best"] == best["accuracy"]
    assert state_of(trained.run)["step"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 3])
def test_newest_checkpoints_are_kept_and_the_best(tmp_path: Path, keep: int) -> None:
    arguments = ("--keep", keep, "--checkpoint-every", 5, "--name", "a")
    # With this learning rate the last epoch is not the best.
    assert here("train", RECIPE, *arguments, "optimizer.options.lr=0.2", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    best = min(events(run, "evaluation"), key=lambda event: event["loss"])["step"]
    assert best < 30
    assert steps_saved(run) == sorted({best, *[30, 35, 39][-keep:]})
    assert state_of(run, "best")["step"] == best
    assert state_of(run)["step"] == 39
    assert {path.name for path in (run / "checkpoints").glob(".*")} == set()


# --- JSON output ---


def refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def one_object(out: str) -> dict[str, Any]:
    """Return the only JSON object on standard output."""
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out, parse_constant=refuse)
    return value


@pytest.mark.slow
def test_json_of_train_is_one_object(tmp_path: Path) -> None:
    done = samestep("train", RECIPE, "--processes", 2, "--name", "a", "--json", cwd=tmp_path)
    small = "Net: some calls computed whole on every process: so small that messages would take longer\n"
    assert (done.code, done.err) == (0, small)
    value = one_object(done.out)
    assert value.keys() == {
        "stopped",
        "step",
        "evaluation",
        "best",
        "best_by",
        "best_epoch",
        "train_loss",
        "seconds",
        "samples_per_second",
        "run",
        "skipped_steps",
    }
    assert (value["stopped"], value["step"], value["run"]) == (False, 39, "runs/a")
    last = events(tmp_path / "runs" / "a", "evaluation")[-1]
    assert value["evaluation"] == {"loss": last["loss"], "samples": 30}


@pytest.mark.parametrize(("processes", "which"), [(2, "best"), pytest.param(3, STEPS, marks=pytest.mark.slow)])
def test_json_of_eval_has_the_numbers_of_training(
    trained: Trained, capsys: pytest.CaptureFixture[str], processes: int, which: object
) -> None:
    before = tree(trained.run)
    arguments = ("eval", "runs/a", "--checkpoint", which, "--processes", processes, "--json")
    assert here(*arguments, cwd=trained.folder) == 0
    value = one_object(capsys.readouterr().out)
    event = {event["step"]: event for event in events(trained.run, "evaluation")}[value["step"]]
    assert {key: value[key] for key in ("loss", "samples", "accuracy")} == {
        key: event[key] for key in ("loss", "samples", "accuracy")
    }
    assert value["checkpoint"].endswith(f"step-{value['step']:09d}")
    assert tree(trained.run) == before, "evaluation changes no file"


@pytest.mark.slow
def test_json_of_resume_of_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    before = weights(run)
    capsys.readouterr()
    assert here("resume", run, "--processes", 2, "--json", cwd=tmp_path) == 0
    value = one_object(capsys.readouterr().out)
    assert (value["stopped"], value["step"], value["run"]) == (False, 13, str(run))
    assert value["evaluation"] == {"loss": events(run, "evaluation")[-1]["loss"], "samples": 30}
    assert weights(run) == before
    (resume,) = events(run, "resume")
    assert (resume["step"], resume["text"].partition(": ")[2]) == (
        13,
        "the run is complete (1 epoch); epochs=N adds epochs",
    )
    entries = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert [(entry["processes"], entry["from_step"]) for entry in entries] == [(1, 0), (2, 13)]


@pytest.mark.slow
def test_json_is_valid_for_an_infinite_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--name", "a", "--json", "epochs=1", "loss.name=helpers.recorded:infinite_in_evaluation")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    assert one_object(capsys.readouterr().out)["step"] == 13


def test_nan_evaluation_is_not_the_best(tmp_path: Path) -> None:
    assert here("train", RECIPE, "--name", "a", "loss.name=helpers.recorded:nan_in_first_evaluation", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    evaluations = events(run, "evaluation")
    assert evaluations[0]["loss"] == "nan"
    best = min(evaluations[1:], key=lambda event: event["loss"])
    assert state_of(run, "best")["step"] == best["step"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=pytest.mark.long)])
def test_auto_starts_one_process_per_core_or_gpu(tmp_path: Path, device: str) -> None:
    arguments = ("--processes", "auto", "--device", device, "--name", "a", "epochs=1")
    assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    (entry,) = json.loads((tmp_path / "runs" / "a" / "environment.json").read_text(encoding="utf-8"))
    is_cpu = device == "cpu" or not torch.cuda.is_available()
    expected = len(os.sched_getaffinity(0)) if is_cpu else torch.cuda.device_count()
    assert entry["processes"] == min(4, expected)


@pytest.mark.slow
def test_runs_without_a_name_get_different_names(tmp_path: Path) -> None:
    for _ in range(3):
        assert here("train", RECIPE, "epochs=1", "batch_size=102", cwd=tmp_path) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_names_are_printed_without_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "[bold] x[red] :fire:"
    assert here("train", RECIPE, "--name", name, "epochs=1", cwd=tmp_path) == 0
    assert f"samestep eval 'runs/{name}'" in capsys.readouterr().out


# --- output in a terminal ---

MOVING = re.compile(r"^epoch \d+ .*?(\d+)/13 .*samples/s")


@pytest.mark.slow
def test_terminal_shows_one_progress_line_and_completed_epochs(tmp_path: Path) -> None:
    train = ("train", RECIPE, "--processes", 2, "--name", "a")
    with open_terminal(80) as terminal, Running(*train, cwd=tmp_path, terminal=terminal.slave) as running:
        assert running.wait(60).code == 0, terminal.frames(1)
    frames = terminal.screen.frames
    moving = [[line for line in frame if MOVING.match(line)] for frame in frames]
    assert any(moving), "no progress line"
    assert max(len(lines) for lines in moving) == 1
    assert all(len(line) <= 80 for lines in moving for line in lines)
    final = frames[-1]
    assert not [line for line in final if MOVING.match(line)]
    assert [line.split("  ")[0] for line in final if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert any(line.startswith("evaluated") for line in final)
