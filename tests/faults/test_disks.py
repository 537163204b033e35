"""File systems that lack operations, and disks that never answer."""

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.machines import faulty_disk, small_disk
from helpers.recorded import count_calls
from helpers.surroundings import RecordFault, require_bounded, require_single_report, wait_for_end
from helpers.system import TESTS, Done, Running, events, here, last_saved, steps_saved, until, weights
from samestep.checkpoint.manifest import verify
from samestep.checkpoint.store import CheckpointFolder

RECIPE = TESTS / "helpers" / "recorded.yaml"
SAVING = ("--checkpoint-every", 3)
HANG = ("--hang-after", "4s")
MISSING = {
    "folder fsync": ("fsync_folder", errno.EINVAL, "without folder fsync"),
    "symbolic links": ("symlink", errno.EPERM, "without symbolic links"),
    "locks": ("flock", errno.ENOSYS, "without locks"),
}
SEVERAL = "folder fsync, symbolic links and locks"
UNANSWERED = {
    "fsync of a checkpoint": ("checkpoints", "fsync_file"),
    "rename of a checkpoint": ("checkpoints", "rename_folder"),
    "write of events.jsonl": ("events.jsonl", "write"),
}


def train(path: Path, variables: dict[str, str], *options: object, runs: str = "runs") -> Running:
    arguments = ("train", RECIPE, "--name", "a", "--processes", 2, "--runs", runs, *SAVING, *options)
    return Running(*arguments, cwd=path, variables=variables)


@pytest.mark.parametrize(
    "missing",
    [pytest.param(SEVERAL, marks=pytest.mark.slow), *(pytest.param(m, marks=pytest.mark.long) for m in MISSING)],
)
def test_file_system_without_an_operation(
    missing: str, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    faults = [fault for name, fault in MISSING.items() if name in missing]
    text = ",".join(f"{call}={number}" for call, number, _ in faults)
    with train(tmp_path, faulty_disk(tmp_path, "runs/a", text)) as running:
        done = running.wait(90)
    assert done.code == 0, done.err
    require_bounded(done.err)
    lines = done.err.splitlines()
    first_epoch = next(number for number, line in enumerate(lines) if line.startswith("epoch 1"))
    for _, _, note in faults:
        assert any(note in line for line in lines[:first_epoch]), done.err
    run = tmp_path / "runs/a"
    checkpoints = run / "checkpoints"
    assert (checkpoints / "last").is_symlink() != ("symbolic links" in missing)
    assert here("resume", run, cwd=tmp_path) == 0
    newest = checkpoints / f"step-{steps_saved(run)[-1]:09d}"
    if not (checkpoints / "last").is_dir():
        assert (checkpoints / "last").read_text(encoding="utf-8") == newest.name
    assert weights(run, newest.name) == undisturbed
    record_fault(
        f"a file system without {missing}",
        "exit code 0; the same weights",
    )


@pytest.mark.slow
def test_file_system_that_cannot_rename_folders(tmp_path: Path, record_fault: RecordFault) -> None:
    variables = faulty_disk(tmp_path, "runs/a/", f"rename_folder={errno.EXDEV}")
    with train(tmp_path, variables) as running:
        done = running.wait(90)
    assert "E_CHECKPOINT_WRITE" in require_single_report(done, 1)
    assert "--runs" in done.err
    assert not events(tmp_path / "runs/a", "step")
    record_fault("a file system that cannot rename folders", "exit code 1")


@pytest.mark.parametrize(
    ("operation", "request_to_stop"),
    [
        pytest.param("fsync of a checkpoint", False, marks=pytest.mark.slow),
        pytest.param("fsync of a checkpoint", True, marks=pytest.mark.long),
        pytest.param("rename of a checkpoint", False, marks=pytest.mark.long),
        pytest.param("write of events.jsonl", True, marks=pytest.mark.long),
    ],
)
def test_disk_that_never_answers(
    operation: str, request_to_stop: bool, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    part, call = UNANSWERED[operation]
    trigger, hold, run = tmp_path / "dead", tmp_path / "hold", tmp_path / "runs/a"
    hold.write_text("0 20", encoding="utf-8")
    with train(tmp_path, faulty_disk(tmp_path, part, f"{call}=0", trigger=trigger), *HANG) as running:
        running.until(lambda: count_calls(tmp_path) == 20 and last_saved(run), "call 20 and a checkpoint")
        trigger.touch()
        hold.unlink()
        began = time.monotonic()
        if request_to_stop:
            running.kill(signal.SIGTERM)
        done = wait_for_end(running, began)
        until(lambda: not running.processes(), "no process is left", 10)
    title = require_single_report(done, 1)
    assert "E_DISK_HANG" in title
    assert call.partition("_")[0] in title
    assert part in title
    assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == undisturbed
    stop = ", and SIGTERM" if request_to_stop else ""
    record_fault(f"a disk that never answers: {operation}{stop}", "exit code 1; resumed on 1: the same weights")


@pytest.mark.long
def test_frozen_disk(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    """Processes that wait for a frozen disk cannot be killed."""
    hold = tmp_path / "hold"
    hold.write_text("0 20", encoding="utf-8")
    with small_disk(tmp_path) as disk:
        run = disk / "runs/a"
        with train(tmp_path, {}, *HANG, runs=str(disk / "runs")) as running:
            running.until(lambda: count_calls(tmp_path) == 20 and last_saved(run), "call 20 and a checkpoint")
            subprocess.run(["fsfreeze", "--freeze", disk], check=True)
            hold.unlink()
            began = time.monotonic()
            done = wait_for_end(running, began + 4)  # the command waits 4 s for processes that cannot be killed
            assert "E_DISK_HANG" in require_single_report(done, 1)
            subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
            until(lambda: not running.processes(), "the killed processes end with the answer", 10)
        assert here("resume", run, cwd=tmp_path) == 0
        assert weights(run) == undisturbed
    record_fault("a frozen disk", "exit code 1; resumed on 1: the same weights")


KILL = 999  # helpers/machine_faults.c
OFTEN_KILLED = ("write", "rename_folder", "unlink")
KILLED = (*OFTEN_KILLED, "fsync_file", "fsync_folder", "rename_file", "symlink", "rmdir")
REFUSED = [
    (errno.EDQUOT, "write"),
    (errno.EROFS, "rename_folder"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            *((errno.EDQUOT, call) for call in ("fsync_file", "rename_folder", "symlink")),
            *((errno.EROFS, call) for call in ("fsync_folder", "rename_file", "symlink")),
        )
    ),
]


def run_with_fault(path: Path, call: str, number: int, *options: object) -> Done:
    """Return the result of a run in which calls for checkpoints fail after step 20; `fault` starts them."""
    trigger, hold = path / "fault", path / "hold"
    hold.write_text("0 20", encoding="utf-8")
    variables = faulty_disk(path, "checkpoints", f"{call}={number}", trigger=trigger)
    with train(path, variables, "--keep", 1, *options) as running:
        running.until(lambda: count_calls(path) == 20 and last_saved(path / "runs/a"), "call 20 and a checkpoint")
        trigger.touch()
        hold.unlink()
        done = running.wait(90)
        until(lambda: not running.processes(), "no process is left", 10)
    checkpoints = CheckpointFolder(path / "runs/a/checkpoints")
    verify(checkpoints.find("last"))
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [call if call in OFTEN_KILLED else pytest.param(call, marks=pytest.mark.long) for call in KILLED]
)
@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.long)])
def test_kill_inside_a_call_of_a_save(
    call: str, restarts: int, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    done = run_with_fault(tmp_path, call, KILL, "--max-restarts", restarts)
    assert not (tmp_path / "fault").exists(), "a save has no such call"
    observed = "exit code 0 after one restart; the same weights"
    if restarts == 0:
        assert "E_RANK_KILLED" in require_single_report(done, 1)
        assert here("resume", "runs/a", cwd=tmp_path) == 0
        observed = "exit code 1; resumed on 1: the same weights"
    else:
        assert done.code == 0, done.err
    assert weights(tmp_path / "runs/a") == undisturbed
    record_fault(f"rank 0 is killed inside {call} of a save, {restarts} restarts", observed)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "call"), REFUSED, ids=lambda value: errno.errorcode.get(value, value))
def test_quota_and_read_only_remount(
    number: int, call: str, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    done = run_with_fault(tmp_path, call, number)
    assert "E_CHECKPOINT_WRITE" in require_single_report(done, 1)
    assert os.strerror(number) in done.err
    assert here("resume", "runs/a", cwd=tmp_path) == 0
    assert weights(tmp_path / "runs/a") == undisturbed
    record_fault(f"{errno.errorcode[number]} at {call} of a save", "exit code 1; resumed on 1: the same weights")
