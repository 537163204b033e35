"""Run directories of custom loops: events, ends and invalid input."""

import json
import sys
from collections.abc import Callable
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DEFAULT_KEEP
from samestep.errors import EXIT_FAILED, InputError
from samestep.launcher.failure import RankError
from samestep.loggers.logger import JsonlLogger
from samestep.runs import folder as run_folder
from samestep.runs.folder import recorded_keep, run_directory
from samestep.session import start


def read_events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def steps(number: int, rows: int = 10, rate: float = 0.1) -> None:
    """Train for some steps."""
    torch.manual_seed(0)
    model = samestep.parallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.randn(rows, 4)).square().mean().backward()
        optimizer.step()


def fast_epoch(run: Path) -> None:
    """Steps within one interval."""
    run_folder.STEP_SECONDS = 1e9
    samestep.init(device="cpu", run=run)
    steps(4)


def test_steps_have_a_bounded_rate(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b"
    samestep.launch(in_folder, tmp_path, fast_epoch, run, processes=2)
    last, end = read_events(run)
    assert (last["event"], last["step"], last["lr"]) == ("step", 4, 0.1)
    assert last["steps_per_second"] > 0
    assert (end["event"], end["stopped"], end["step"]) == ("end", False, 4)


def of_ranks(run: Path) -> None:
    """Batch and rate grow with the number of ranks."""
    world = samestep.init(device="cpu", run=run)
    steps(1, 8 * world.size, 0.1 * world.size)


def test_other_batch_and_rate_at_a_later_start_are_reported(tmp_path: Path) -> None:
    run = tmp_path / "a"
    for processes in (2, 2, 3):
        samestep.launch(in_folder, tmp_path, of_ranks, run, processes=processes)
    starts = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert [(start["batch_size"], start["lr"]) for start in starts] == [(16, 0.2), (16, 0.2), (24, 0.1 * 3)]
    assert all(start["started"] and start["samestep"] for start in starts)
    notes = [event["text"] for event in read_events(run) if event["event"] == "note"]
    assert notes == [
        "batch_size is 24, and was 16 at an earlier start",
        f"lr is {0.1 * 3}, and was 0.2 at an earlier start",
    ]


def in_folder(folder: Path, function: Callable[[Path], Any], run: Path) -> Any:
    with chdir(folder):
        return function(run)


def exits(run: Path, how: str) -> None:
    with samestep.init(device="cpu", run=run):
        steps(1)
        if how == "exit":
            sys.exit(0)
        if how == "error":
            raise InputError("a value", code="E_VALUE")


def initializes(run: Path, how: str) -> None:
    samestep.init(device="cpu", run=run)
    steps(1)
    if how == "error":
        raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("function", "how", "last"),
    [
        (exits, "error", {"event": "failure", "code": "E_VALUE", "exit_code": 2, "text": "a value"}),
        (
            initializes,
            "error",
            {
                "event": "failure",
                "code": "E_RANK_FAILED",
                "exit_code": EXIT_FAILED,
                "text": "ValueError: no such thing",
            },
        ),
        (initializes, "end", {"event": "end", "stopped": False, "step": 1}),
        (exits, "exit", {"event": "end"}),
    ],
)
def test_last_event_is_the_end_of_the_loop(
    tmp_path: Path, function: Callable[..., None], how: str, last: dict[str, Any]
) -> None:
    # A rank that exits by itself ends the launch.
    with nullcontext() if how == "end" else pytest.raises(RankError):
        samestep.launch(function, tmp_path / "run", how, processes=1)
    event = read_events(tmp_path / "run")[-1]
    assert {name: event[name] for name in last} == last


# --- invalid input ---


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/tmp", "a\nb"])
def test_name_of_a_run_is_that_of_a_folder(name: str) -> None:
    with pytest.raises(InputError) as failure:
        run_directory(name)
    assert failure.value.code == "E_RUN_NAME"


def refused(cases: list[tuple[Any, list[Any]]]) -> list[str]:
    codes = []
    for run, loggers in cases:
        try:
            with start(device="cpu", run=run, loggers=loggers):
                codes.append("accepted")
        except InputError as error:
            codes.append(error.code)
    return codes


def test_directories_and_loggers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recipe, files, mine = tmp_path / "recipe", tmp_path / "files", tmp_path / "mine"
    recipe.mkdir()
    (recipe / "recipe.yaml").write_text("epochs: 1\n", encoding="utf-8")
    files.mkdir()
    (files / "notes.txt").touch()
    (mine / "checkpoints").mkdir(parents=True)
    cases: list[tuple[Any, list[Any]]] = [
        (recipe, []),
        (files, []),
        (files / "notes.txt" / "run", []),
        (tmp_path / "new", ["paper"]),
        (tmp_path / "new", ["progress"]),
        (None, ["tensorboard"]),
        (mine, [JsonlLogger(tmp_path / "own.jsonl")]),
        (mine, []),
    ]
    assert samestep.launch(refused, cases, processes=1) == [
        *("E_OUTPUT", "E_OUTPUT", "E_LOCKED", "E_UNKNOWN_NAME", "E_UNKNOWN_NAME", "E_UNKNOWN_NAME"),
        *("accepted", "accepted"),
    ]
    assert sorted(path.name for path in recipe.iterdir()) == ["recipe.yaml"]
    assert not (tmp_path / "new").exists()


def start_by_rank(folder: Path) -> str:
    from samestep.launcher.process_state import rank_and_size

    with start(device="cpu", run=folder / str(rank_and_size()[0])):
        return ""


def test_ranks_have_the_same_run(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failure:
        samestep.launch(start_by_rank, tmp_path, processes=2)
    assert failure.value.code == "E_RUN_NAME"


@pytest.mark.slow
def test_second_script_in_one_run_is_refused(tmp_path: Path) -> None:
    from samestep.checkpoint.folder_lock import FolderLock

    with FolderLock(tmp_path / "run"):  # of this process; the rank is another one
        assert samestep.launch(refused, [(tmp_path / "run", [])], processes=1) == ["E_LOCKED"]


@pytest.mark.parametrize(
    ("starts", "present", "expected"),
    [
        ([], 0, 2),
        ([{"keep": 9}, {"keep": 1}], 3, 1),
        ([{"processes": 2}], 4, 4),
        ([{"keep": "many"}], 1, 2),
        ([{"keep": 0}], 3, 3),
    ],
)
def test_a_run_without_a_record_keeps_its_checkpoints(
    tmp_path: Path, starts: list[dict[str, Any]], present: int, expected: int
) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(starts), encoding="utf-8")
    for step in range(present):
        CheckpointFolder(tmp_path / "checkpoints", 9).write(step, {"state.json": b"{}"})
    assert recorded_keep(tmp_path) == expected


@pytest.mark.parametrize("entries", ["[1, 2]", "{}", "3", "[{", ""])
def test_damaged_entries_of_starts_are_reported(entries: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "environment.json").write_text(entries, encoding="utf-8")
    assert recorded_keep(tmp_path) == DEFAULT_KEEP
    assert "its earlier entries are lost" in caplog.text
