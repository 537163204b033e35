"""`samestep profile` names what was planted first, and nothing where nothing is wrong."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import EXIT_DONE, EXIT_INPUT
from samestep.tools.profile.advice import Cause
from samestep.tools.profile.steps import PHASES
from system import answer, here, samestep

RECIPE = Path(__file__).parents[1] / "bottlenecks.yaml"
FEW = ("--wait", 1, "--warmup", 1, "--active", 8, "--traced", 3, "--no-picture")

# What is planted, by options of the command, and on how many processes.
PLANTED = {
    Cause.LOADER: (2, ("--set", "data.options.seconds=0.004", "model.options.compute=1")),
    Cause.RANK: (
        3,
        ("--set", "model.options.compute=1", "model.options.late_rank=1", "model.options.seconds=0.05"),
    ),
    Cause.SYNCHRONISATION: (
        2,
        ("--set", "model.options.compute=1", "loss.name=bottlenecks:loss_with_log", "loss.options.times=20"),
    ),
    Cause.BUCKETS: (
        2,
        ("--set", "model.options.layers=60", "strategy.name=ddp", "strategy.bucket_mb=0.001", "shards=2"),
    ),
    Cause.CHECKPOINT: (2, ("--set", "model.options.compute=1", "model.options.frozen=8000000")),
    Cause.HOST: (2, ("--set", "model.options.layers=50", "shards=8")),
}
SAVING = ("--checkpoint-every", 1)


def profiled(capsys: pytest.CaptureFixture[str], place: Path, *arguments: object) -> Any:
    assert here("profile", RECIPE, "--json", "--out", "found", *arguments, cwd=place) == EXIT_DONE
    return answer(capsys)


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[] if cause == Cause.RANK else pytest.mark.slow) for cause in PLANTED]
)
def test_planted_bottleneck_is_named_first(capsys: pytest.CaptureFixture[str], tmp_path: Path, cause: Cause) -> None:
    processes, given = PLANTED[cause]
    saving = SAVING if cause == Cause.CHECKPOINT else ()
    found = profiled(capsys, tmp_path, "--processes", processes, *FEW, *saving, *given)
    assert found["advice"], found["ranks"]
    first = found["advice"][0]
    assert first["cause"] == cause, found["advice"]
    assert 0.1 <= first["share"] <= 1
    assert first["evidence"] and first["do"] and first["estimate"]
    if cause == Cause.RANK:
        assert found["straggler"]["rank"] == 1
        assert found["straggler"]["phase"] == "forward"
    if cause == Cause.SYNCHRONISATION:
        assert "bottlenecks.py:" in first["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_told_of_a_sound_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path, processes: int) -> None:
    # Many steps, so that other programs on the same cores are in the way of each rank alike.
    given = ("--active", 24, "--set", "model.options.compute=12", "--checkpoint-every", 13)
    found = profiled(capsys, tmp_path, "--processes", processes, *FEW, *given)
    assert found["advice"] == []


@pytest.mark.slow
def test_traces_of_chosen_ranks_are_one_file_that_shows_all_of_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--processes", 3, "--active", 2, "--traced", 2)
    profiled(capsys, tmp_path, *given, "--ranks", "1")
    earlier = set((tmp_path / "found" / "tensorboard").iterdir())
    found = profiled(capsys, tmp_path, *given, "--ranks", "0,2")
    for path in earlier:
        path.unlink()
    files = sorted(path.name for path in (tmp_path / found["tensorboard"]).iterdir())
    # As TensorBoard's plugin looks for them: worker, time, ending.
    assert [re.fullmatch(r"(.*?)(\.\d+)?\.pt\.trace\.json\.gz", name)[1] for name in files] == ["rank-0", "rank-2"]
    assert set(found["traced"]) == {"0", "2"}
    assert all(each["operators"] and each["count"] > 10 for each in found["traced"].values())
    with gzip.open(tmp_path / found["trace"], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(3)}
    spans = {rank: [e for e in events if e["ph"] == "X" and e["pid"] == rank] for rank in range(3)}
    for rank, own in spans.items():
        assert {"data", "forward", "backward", "communication", "optimizer"} <= {event["name"] for event in own}
        assert ("aten::mm" in {event["name"] for event in own}) == (rank != 1)
    # Operators lie within the forwards that our own clock tells of, so both clocks are laid beside each other rightly.
    forwards = [(e["ts"], e["ts"] + e["dur"]) for e in spans[0] if e["name"] == "forward"]
    losses = [event["ts"] for event in spans[0] if event["name"] == "aten::nll_loss_forward"]
    assert len(losses) == len(forwards) > 0
    assert all(any(begin <= moment <= end for begin, end in forwards) for moment in losses)
    # Nobody is through with the sum before the last has come to it.
    sums = {rank: [e for e in own if e.get("cat") == "samestep" and e["tid"] == 2] for rank, own in spans.items()}
    for same in zip(*sums.values(), strict=True):
        assert min(e["ts"] + e["dur"] for e in same) >= max(e["ts"] for e in same)


@pytest.mark.slow
def test_phases_are_the_whole_step_and_everything_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = profiled(capsys, tmp_path, "--processes", 2, "--active", 4, "--checkpoint-every", 2, "--traced", 1)
    for rank in found["ranks"]:
        whole = sum(rank[phase] for phase in PHASES)
        assert whole == pytest.approx(found["step_seconds"], rel=0.2)
        assert rank["waiting_for_a_later_rank"] <= rank["communication"] + 1e-6
    assert found["ranks"][0]["checkpoint"] > 0
    assert (tmp_path / "found" / "profile.png").stat().st_size > 5_000
    assert {"checkpoints", "profile.json", "tensorboard"} <= {path.name for path in (tmp_path / "found").iterdir()}
    assert not (tmp_path / "runs").exists()
    written = json.loads((tmp_path / "found" / "profile.json").read_text())
    assert {**written, "folder": "found"} == found


@pytest.mark.slow
def test_steps_are_those_of_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("--checkpoint-every", 3, "--set", "epochs=1", "model.options.layers=2", "shards=8")
    profiled(capsys, tmp_path, "--processes", 2, "--wait", 1, "--warmup", 1, "--active", 3, "--traced", 1, *given)
    assert here("train", RECIPE, "--name", "first", *given, "--keep", 9, cwd=tmp_path) == EXIT_DONE
    for name in ("model.safetensors", "optimizer.safetensors"):
        saved = Path("checkpoints", "step-000000003", name)
        assert (tmp_path / "found" / saved).read_bytes() == (tmp_path / "runs" / "first" / saved).read_bytes()


def test_without_traces_phases_are_told_all_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("--traced", 0, "--active", 2, "--no-picture", "--out", "found")
    assert here("profile", RECIPE, *given, cwd=tmp_path) == EXIT_DONE
    said = capsys.readouterr().out
    assert all(word in said for word in ("forward", "optimizer", "profile.json"))
    assert "trace.json" not in said
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["profile.json"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_what_is_not_known_of_a_divided_model_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str
) -> None:
    given = ("--strategy", strategy, "--processes", 2, "--active", 2, "--traced", 3, "--no-picture")
    found = profiled(capsys, tmp_path, *given, "--set", "model.options.layers=4")
    assert any("communicates within forward and backward" in note for note in found["notes"])
    [first, second] = [[rank[phase] > 0 for phase in ("forward", "backward", "computing")] for rank in found["ranks"]]
    assert first == second == ([False, False, True] if strategy == "pp" else [True, True, False])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--active", "0"), "--active 0"),
        (("--wait", "-1"), "--wait -1"),
        (("--traced", "-2"), "--traced -2"),
        (("--ranks", "0,2", "--processes", "2"), "--ranks 0,2 with 2 processes"),
        (("--ranks", "some"), "--ranks some"),
        (("--checkpoint-every", "0"), "checkpoint_every is 0"),
        (("--processes", "none"), "--processes none"),
        (("--processes", "5"), "5 ranks"),
        (("--set", "batch=3"), "batch"),
    ],
)
def test_wrong_input_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert here("profile", RECIPE, *arguments, "--device", "cpu", cwd=tmp_path) == EXIT_INPUT
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(tmp_path: Path) -> None:
    assert "example: samestep profile digits" in samestep("profile", "--help", cwd=tmp_path).out
