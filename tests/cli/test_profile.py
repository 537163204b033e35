"""Tests of `samestep profile`: planted bottlenecks are the first advice, and a sound recipe gets none."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.system import answer, here, samestep, tree
from samestep.errors import EXIT_DONE, EXIT_INPUT
from samestep.tools.profile.causes import Cause
from samestep.tools.profile.measurements import PHASES

RECIPE = Path(__file__).parents[1] / "helpers" / "bottlenecks.yaml"
SAVING = Path(__file__).parents[1] / "helpers" / "saving_loop.py"
FEW = ("--wait", 1, "--warmup", 1, "--active", 8, "--traced", 3, "--no-picture")

# Number of processes and options of the command that plant each bottleneck.
PLANTED = {
    Cause.LOADER: (2, ("--set", "data.options.seconds=0.004", "model.options.compute=1")),
    Cause.RANK: (
        3,
        ("--set", "model.options.compute=1", "model.options.late_rank=1", "model.options.seconds=0.05"),
    ),
    Cause.SYNCHRONISATION: (
        2,
        ("--set", "model.options.compute=1", "loss.name=helpers.bottlenecks:loss_with_log", "loss.options.times=20"),
    ),
    Cause.BUCKETS: (
        2,
        (
            "--set",
            "model.options.layers=60",
            "model.options.compute=1",
            "strategy.name=ddp",
            "strategy.bucket_mb=0.001",
        ),
    ),
    Cause.CHECKPOINT: (2, ("--set", "model.options.compute=1", "model.options.frozen=8000000")),
    Cause.HOST: (2, ("--set", "model.options.layers=50", "microbatches=8")),
}
CHECKPOINTS = ("--checkpoint-every", 1)


def run_profile(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> Any:
    assert here("profile", RECIPE, "--json", "--out", "output", *arguments, cwd=folder) == EXIT_DONE
    return answer(capsys)


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[] if cause == Cause.RANK else pytest.mark.long) for cause in PLANTED]
)
def test_planted_bottleneck_is_the_first_advice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cause: Cause
) -> None:
    processes, options = PLANTED[cause]
    checkpoints = CHECKPOINTS if cause == Cause.CHECKPOINT else ()
    result = run_profile(capsys, tmp_path, "--processes", processes, *FEW, *checkpoints, *options)
    assert result["advice"], result["ranks"]
    first = result["advice"][0]
    assert first["cause"] == cause, result["advice"]
    assert 0.1 <= first["share"] <= 1
    assert first["evidence"] and first["do"] and first["estimate"]
    if cause == Cause.RANK:
        assert result["straggler"]["rank"] == 1
        assert result["straggler"]["phase"] == "forward"
    if cause == Cause.SYNCHRONISATION:
        assert "bottlenecks.py:" in first["evidence"]


@pytest.mark.slow
# Two busy cores delay one of two ranks more than the other in some runs.
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sound_recipe_gets_no_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path, processes: int) -> None:
    # With many steps, other programs on the same cores delay all ranks alike.
    options = ("--active", 24, "--set", "model.options.compute=24", "--checkpoint-every", 13)
    result = run_profile(capsys, tmp_path, "--processes", processes, *FEW, *options)
    assert result["advice"] == []


@pytest.mark.slow
def test_merged_trace_contains_selected_traces_and_all_phases(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--processes", 3, "--active", 2, "--traced", 2)
    run_profile(capsys, tmp_path, *options, "--ranks", "1")
    earlier = set((tmp_path / "output" / "tensorboard").iterdir())
    result = run_profile(capsys, tmp_path, *options, "--ranks", "0,2")
    for path in earlier:
        path.unlink()
    files = sorted(path.name for path in (tmp_path / result["tensorboard"]).iterdir())
    # Names that TensorBoard's plugin recognizes: worker, time, suffix.
    assert [re.fullmatch(r"(.*?)(\.\d+)?\.pt\.trace\.json\.gz", name)[1] for name in files] == ["rank-0", "rank-2"]
    assert set(result["traced"]) == {"0", "2"}
    assert all(summary["operators"] and summary["count"] > 10 for summary in result["traced"].values())
    with gzip.open(tmp_path / result["trace"], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(3)}
    spans = {rank: [e for e in events if e["ph"] == "X" and e["pid"] == rank] for rank in range(3)}
    for rank, own in spans.items():
        assert {"data", "forward", "backward", "communication", "optimizer"} <= {event["name"] for event in own}
        assert ("aten::mm" in {event["name"] for event in own}) == (rank != 1)
    # Operators are within recorded forwards, so both clocks agree.
    forwards = [(e["ts"], e["ts"] + e["dur"]) for e in spans[0] if e["name"] == "forward"]
    losses = [event["ts"] for event in spans[0] if event["name"] == "aten::nll_loss_forward"]
    assert len(losses) == len(forwards) > 0
    assert all(any(begin <= time <= end for begin, end in forwards) for time in losses)
    # No rank finishes an all-reduce before the last rank has arrived.
    reductions = {rank: [e for e in own if e.get("cat") == "samestep" and e["tid"] == 2] for rank, own in spans.items()}
    for same in zip(*reductions.values(), strict=True):
        assert min(e["ts"] + e["dur"] for e in same) >= max(e["ts"] for e in same)


@pytest.mark.slow
def test_phases_add_up_to_the_step_and_all_files_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = run_profile(capsys, tmp_path, "--processes", 2, "--active", 4, "--checkpoint-every", 2, "--traced", 1)
    seconds = [sum(rank[phase] for phase in PHASES) for rank in result["ranks"]]
    assert sum(seconds) / 2 == pytest.approx(result["step_seconds"])
    for rank in result["ranks"]:
        assert rank["waiting_for_a_later_rank"] <= rank["communication"] + 1e-6
    assert result["ranks"][0]["checkpoint"] > 0
    assert (tmp_path / "output" / "profile.png").stat().st_size > 5_000
    assert {"checkpoints", "profile.json", "tensorboard"} <= {path.name for path in (tmp_path / "output").iterdir()}
    assert not (tmp_path / "runs").exists()
    written = json.loads((tmp_path / "output" / "profile.json").read_text())
    assert {**written, "folder": "output"} == result


@pytest.mark.slow
def test_steps_have_the_bits_of_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--checkpoint-every", 3, "--set", "epochs=1", "model.options.layers=2", "microbatches=8")
    run_profile(capsys, tmp_path, "--processes", 2, "--wait", 1, "--warmup", 1, "--active", 3, "--traced", 1, *options)
    assert here("train", RECIPE, "--name", "first", *options, "--keep", 9, cwd=tmp_path) == EXIT_DONE
    for name in ("model.safetensors", "optimizer.safetensors"):
        saved = Path("checkpoints", "step-000000003", name)
        assert (tmp_path / "output" / saved).read_bytes() == (tmp_path / "runs" / "first" / saved).read_bytes()


def test_without_traces_phases_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--traced", 0, "--active", 2, "--no-picture", "--out", "output")
    assert here("profile", RECIPE, *options, cwd=tmp_path) == EXIT_DONE
    output = capsys.readouterr().out
    assert all(word in output for word in ("forward", "optimizer", "profile.json"))
    assert "trace.json" not in output
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["profile.json"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_unmeasured_communication_of_a_divided_model_has_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str
) -> None:
    options = ("--strategy", strategy, "--processes", 2, "--active", 2, "--traced", 3, "--no-picture")
    result = run_profile(capsys, tmp_path, *options, "--set", "model.options.layers=4")
    assert any("communicates within forward and backward" in note for note in result["notes"])
    [first, second] = [[rank[phase] > 0 for phase in ("forward", "backward", "computing")] for rank in result["ranks"]]
    assert first == second == ([False, False, True] if strategy == "pp" else [True, True, False])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--active", "0"), "--active 0"),
        (("--wait", "-1"), "--wait -1"),
        (("--traced", "-2"), "--traced -2"),
        (("--ranks", "0,2", "--processes", "2"), "--ranks 0,2 with 2 processes [E_RANKS]"),
        (("--ranks", "some"), "E_RANKS"),
        (("--checkpoint-every", "0"), "--checkpoint-every is 0"),
        (("--processes", "none"), "--processes none"),
        (("--processes", "5"), "5 ranks"),
        (("--set", "batch=3"), "batch"),
    ],
)
def test_invalid_input_creates_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert here("profile", RECIPE, *arguments, "--device", "cpu", cwd=tmp_path) == EXIT_INPUT
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_checkpoints_and_run_of_a_script_are_neither_read_nor_written(tmp_path: Path) -> None:
    shutil.copy(SAVING, tmp_path / "train.py")
    assert here("run", "--processes", 2, "train.py", 2, cwd=tmp_path) == EXIT_DONE
    before = tree(tmp_path)
    assert "checkpoints/step-000000008/model.safetensors" in before
    options = ("--wait", 0, "--warmup", 0, "--active", 9, "--traced", 0, "--no-picture", "--out", "output")
    for processes, epochs in ((2, 40), (1, 3)):
        (tmp_path / "positions.txt").unlink()
        assert here("profile", "train.py", "--processes", processes, *options, "--", epochs, cwd=tmp_path) == EXIT_DONE
        assert (tmp_path / "positions.txt").read_text(encoding="utf-8").split() == ["0"]
        assert {path.suffix for path in (tmp_path / "output").iterdir()} == {".json", ".log"}
        shutil.rmtree(tmp_path / "output")
        assert tree(tmp_path) == before


def test_help_has_an_example(tmp_path: Path) -> None:
    assert "example: samestep profile digits" in samestep("profile", "--help", cwd=tmp_path).out
