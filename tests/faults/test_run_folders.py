"""Run directories that are moved, replaced, damaged, unreadable or on a full disk."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.disk_faults import fail_with, intercepting, kill, mounted
from helpers.fault_cases import in_step
from helpers.permissions import without_access
from helpers.surroundings import RecordFault, nothing_left_behind, require_bounded, require_single_report, wait_for_end
from helpers.system import Running, events, here, last_saved, steps_saved, tree, weights
from samestep.checkpoint.durable_files import write_atomically
from samestep.checkpoint.store import CheckpointFolder
from samestep.distributed.disk_operations import HeldFolder
from samestep.errors import RunError, RunMovedError
from samestep.loggers.logger import JsonlLogger, RunLogger

RECIPE = Path(__file__).parents[1] / "helpers" / "faulty.yaml"
SAVING = ("--checkpoint-every", 3)
FILES = {"model": b"1" * 50, "state.json": b"{}"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run on one process that a failure ended in step 7."""
    path = tmp_path_factory.mktemp("stopped")
    (path / "fault.json").write_text(json.dumps(in_step("raise", 0, 7)), encoding="utf-8")
    assert here("train", RECIPE, "--name", "a", *SAVING, cwd=path) == 1
    assert steps_saved(path / "runs/a") == [3, 6]
    return path


@pytest.fixture(scope="module")
def undisturbed(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    assert here("train", RECIPE, "--name", "a", cwd=path) == 0
    return weights(path / "runs/a")


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "copy", symlinks=True)


# --- moved and replaced ----------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_is_moved_and_replaced_ends_at_the_next_write(
    restarts: int, stopped: Path, undisturbed: tuple[str, str], tmp_path: Path, record_fault: RecordFault
) -> None:
    (tmp_path / "pace").write_text("0.05", encoding="utf-8")
    arguments = ("train", RECIPE, "--name", "a", *SAVING, "--max-restarts", restarts)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: last_saved(tmp_path / "runs/a") >= 3, "a checkpoint")
        (tmp_path / "runs/a").rename(tmp_path / "moved")
        shutil.copytree(stopped / "runs/a", tmp_path / "runs/a", symlinks=True)
        other = tree(tmp_path / "runs/a")
        with nothing_left_behind(running, tmp_path):
            done = wait_for_end(running, time.monotonic())
    assert "E_NOT_A_RUN" in require_single_report(done, 1)
    assert tree(tmp_path / "runs/a") == other
    (tmp_path / "pace").unlink()
    assert here("resume", "moved", cwd=tmp_path) == 0
    assert weights(tmp_path / "moved") == undisturbed
    record_fault(
        "a run is renamed, and another one takes its place" + (", restarts allowed" if restarts else ""),
        "exit code 1; the other run is unchanged; resumed at the new path",
    )


@pytest.mark.parametrize("is_replaced", [True, False])
def test_nothing_is_written_after_a_folder_was_moved(
    is_replaced: bool, tmp_path: Path, record_fault: RecordFault
) -> None:
    run = tmp_path / "run"
    folder = CheckpointFolder(run / "checkpoints")
    folder.write(1, FILES)
    held = HeldFolder(run)
    folder.hold(held)
    with pytest.raises(RunMovedError), RunLogger([JsonlLogger(run / "events.jsonl")], held) as logger:
        folder.write(2, FILES)
        logger.log_event("note", text="before")
        assert held.is_in_place()
        run.rename(tmp_path / "moved")
        if is_replaced:
            shutil.copytree(tmp_path / "moved", run, symlinks=True)
        before = tree(tmp_path)
        assert not held.is_in_place()
        with pytest.raises(RunMovedError):
            folder.write(3, FILES)
        logger.log_event("note", text="after")
    assert tree(tmp_path) == before
    fault = "a folder of checkpoints is " + ("replaced" if is_replaced else "removed")
    record_fault(fault, "E_NOT_A_RUN; nothing is written")


# --- side files ---------------------------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: 2 * len(data) // 3],
    "binary": lambda data: bytes(range(256)) * 4,
    "other JSON": lambda data: b'[1, "x", null]\n',
}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=pytest.mark.slow if name == "cut" else pytest.mark.long) for name in DAMAGE]
)
def test_damaged_side_files_are_rebuilt(
    copy: Path, undisturbed: tuple[str, str], damage: str, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    run = copy / "runs/a"
    for name in ("environment.json", "recipe.yaml", "data.json", "events.jsonl", "ranks/rank-0.jsonl", ".lock"):
        (run / name).write_bytes(DAMAGE[damage]((run / name).read_bytes()))
    (run / ".environment.json.writing").write_bytes(b"of a killed process")
    capfd.readouterr()
    assert here("resume", run, cwd=copy) == 0
    assert "recipe.yaml" in capfd.readouterr().err
    assert weights(run) == undisturbed
    (start,) = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert start["from_step"] == 6
    assert not list(run.glob(".*.writing"))
    last = json.loads((run / "events.jsonl").read_bytes().splitlines()[-1])
    assert last["event"] == "end"
    assert here("resume", run, "epochs=2", cwd=copy) == 0, "the rebuilt files are not complete"
    record_fault(f"all side files of a run are damaged: {damage}", "exit code 0")


def test_no_call_that_fails_damages_a_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "environment.json"
    path.write_text("old", encoding="utf-8")
    errors = 0
    for call in range(20):
        with intercepting(monkeypatch, call, call, fail_with(errno.ENOSPC, removing=False)):
            try:
                write_atomically(path, "new" * 100)
            except RunError as error:
                errors += 1
                assert "No space left" in error.value
        assert path.read_text(encoding="utf-8") in ("old", "new" * 100)
        assert [file.name for file in tmp_path.iterdir()] == ["environment.json"]
    assert errors >= 3


def test_no_kill_damages_a_side_file(tmp_path: Path, record_fault: RecordFault) -> None:
    path = tmp_path / "environment.json"
    kills = 0
    for call in range(20):
        path.write_text("old", encoding="utf-8")
        process = os.fork()
        if not process:
            with pytest.MonkeyPatch.context() as patch, intercepting(patch, call, call, kill):
                write_atomically(path, "new" * 100)
            os._exit(0)
        kills += os.waitpid(process, 0)[1] == signal.SIGKILL
        assert path.read_text(encoding="utf-8") in ("old", "new" * 100)
        write_atomically(path, "newest")
        assert [file.name for file in tmp_path.iterdir()] == ["environment.json"]
    assert kills >= 3
    record_fault("rank 0 is killed while it writes a side file", "the old or the new file is complete")


# --- access ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unreadable_files_are_input_errors(
    copy: Path, capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    run, checkpoint = copy / "runs/a", copy / "runs/a/checkpoints/step-000000006"
    for path in (checkpoint / "model.safetensors", checkpoint / "manifest.json", checkpoint, run / "checkpoints", run):
        mode = path.stat().st_mode
        path.chmod(0)
        capsys.readouterr()
        with without_access():
            code = here("resume", run, "--checkpoint", 6, cwd=copy)
        path.chmod(mode)
        report = capsys.readouterr().err
        assert code == 2, f"{path}: {report}"
        assert report.count("error: ") == 1
        require_bounded(report)
    record_fault("files of a run cannot be read", "exit code 2")


@pytest.mark.long
def test_a_run_without_checkpoint_can_be_resumed_as_train_proposes(
    tmp_path: Path, undisturbed: tuple[str, str], capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    (tmp_path / "fault.json").write_text(json.dumps(in_step("raise", 0, 2)), encoding="utf-8")
    assert here("train", RECIPE, "--name", "a", cwd=tmp_path) == 1
    capsys.readouterr()
    assert here("train", RECIPE, "--name", "a", cwd=tmp_path) == 2
    assert "samestep resume runs/a" in capsys.readouterr().err
    assert here("resume", "runs/a", "--checkpoint", "best", cwd=tmp_path) == 2
    assert here("resume", "runs/a", cwd=tmp_path) == 0
    assert weights(tmp_path / "runs/a") == undisturbed
    record_fault(
        "a run fails before its first checkpoint",
        "exit code 1; resumed: the same weights",
    )


# --- full disk ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "tmpfs")


def fill(disk: Path) -> Path:
    """Fill a disk to its last byte, and return the file."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    assert os.statvfs(disk).f_bavail == 0
    return path


@pytest.mark.slow
def test_commands_on_a_full_disk_are_reported(
    disk: Path, stopped: Path, undisturbed: tuple[str, str], tmp_path: Path, record_fault: RecordFault
) -> None:
    shutil.copytree(stopped / "runs", disk / "runs", symlinks=True)
    filler = fill(disk)
    before = tree(disk / "runs/a/checkpoints")
    for command in (("train", RECIPE, "--name", "b"), ("resume", "runs/a")):
        with Running(*command, cwd=disk) as running, nothing_left_behind(running, disk):
            done = running.wait(60)
        require_single_report(done, done.code)
        assert done.code in (1, 2)
        assert "No space left" in done.err
    assert tree(disk / "runs/a/checkpoints") == before
    assert not (disk / "runs/b").exists()
    filler.unlink()
    assert here("resume", "runs/a", cwd=disk) == 0
    assert weights(disk / "runs/a") == undisturbed
    record_fault("train and resume on a disk without a free byte", "exit code 1 or 2")


@pytest.mark.long
def test_a_disk_that_fills_up_costs_no_report(
    disk: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    (disk / "fault.json").write_text(json.dumps(in_step("raise undecodable", 1, 5)), encoding="utf-8")
    (disk / "pace").write_text("0.2", encoding="utf-8")
    with Running("train", RECIPE, "--name", "a", "--checkpoint-every", 2, "--processes", 4, cwd=disk) as running:
        running.until(lambda: last_saved(disk / "runs/a"), "a checkpoint")
        filler = fill(disk)
        began = time.monotonic()
        with nothing_left_behind(running, disk):
            done = wait_for_end(running, began)
    assert require_single_report(done, 1)
    filler.unlink()
    (disk / "pace").unlink()
    (disk / "fault.json").unlink(missing_ok=True)
    assert here("resume", "runs/a", cwd=disk) == 0
    assert weights(disk / "runs/a") == undisturbed
    assert events(disk / "runs/a", "end")
    record_fault(
        "the disk fills up during a run",
        "exit code 1; resumed: the same weights",
    )
