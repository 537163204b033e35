"""Machines with low limits, without a network, a /proc or a current folder; pauses; other users; absurd recipes."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from helpers.machines import first_process, in_shell
from helpers.surroundings import (
    RecordFault,
    nothing_left_behind,
    require_bounded,
    require_single_report,
    temporary_files,
    temporary_folder,
    wait_for_end,
)
from helpers.system import TESTS, Running, arguments_of, here, steps_saved, weights
from samestep.checkpoint.folder_lock import FolderLock

RECIPE = TESTS / "helpers" / "faulty.yaml"
HOLDING = TESTS / "helpers" / "recorded.yaml"
TRAIN = ("train", RECIPE, "--name", "a")
REFUSED = {
    "24 open files": ("ulimit -n 24", "", "E_MACHINE"),
    "no network interface": ("true", "--net", "E_MACHINE"),
    "the current folder was removed": ('mkdir "$TMPDIR/gone"; cd "$TMPDIR/gone"; rmdir "$PWD"', "", "E_UNREADABLE"),
}
OTHER_USER = 65534
SECONDS = 20  # of CPU time; a value that is expanded or allocated takes minutes


@pytest.mark.slow
@pytest.mark.parametrize("fault", REFUSED)
def test_refused_machine(fault: str, tmp_path: Path, record_fault: RecordFault) -> None:
    setup, unshare, code = REFUSED[fault]
    variables, command = temporary_folder(tmp_path), in_shell(setup, unshare=unshare)
    with Running(*TRAIN, "--processes", 2, cwd=tmp_path, variables=variables, command=command) as running:
        with nothing_left_behind(running, tmp_path):
            done = running.wait(60)
        assert code in require_single_report(done, 2)
    assert not (tmp_path / "runs").exists()
    record_fault(fault, f"exit code 2, {code}")


@pytest.mark.slow
def test_narrow_container(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    """A run in a container with several properties that are harmless each."""
    setup = "ip link set lo up; mount -t tmpfs -o size=64m tmpfs /dev/shm; ulimit -s 256; ulimit -S -n 20"
    folder = tmp_path / "t" / ("long" * 30)
    folder.mkdir(parents=True)
    command = in_shell(setup, unshare="--net --mount")
    options = ("--processes", 2, "--workers", 1)
    with Running(*TRAIN, *options, cwd=tmp_path, variables={"TMPDIR": str(folder)}, command=command) as running:
        done = running.wait(90)
    assert done.code == 0, done.err
    require_bounded(done.err)
    assert not any(line.startswith("error: ") for line in done.err.splitlines())
    assert weights(tmp_path / "runs/a") == undisturbed
    assert not temporary_files(folder)
    for fault in (
        "64 MB of shared memory with loader workers",
        "a stack of 256 kB",
        "20 open files, which the command may raise",
        "a temporary folder with a path of more than 107 bytes",
    ):
        record_fault(fault, "exit code 0; the same weights")


@pytest.mark.slow
def test_no_proc(tmp_path: Path, record_fault: RecordFault) -> None:
    command = in_shell("mount -t tmpfs tmpfs /proc", unshare="--mount")
    with Running(*TRAIN, "--processes", 2, cwd=tmp_path, command=command) as running:
        done = running.wait(90)
    assert done.code == 0, done.err
    require_bounded(done.err)
    assert steps_saved(tmp_path / "runs/a") == [13]
    record_fault("no /proc", "exit code 0")


def handles_sigterm(process: int) -> bool:
    """Return whether a process has a handler for SIGTERM."""
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    caught = int(text.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> signal.SIGTERM - 1 & 1)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, pytest.param(2.0, marks=pytest.mark.long)])
def test_end_at_start_as_pid_1(seconds: float, tmp_path: Path, record_fault: RecordFault) -> None:
    command = in_shell("true", unshare="--pid --fork --mount-proc")
    variables = temporary_folder(tmp_path)
    with Running("train", HOLDING, "--name", "a", cwd=tmp_path, variables=variables, command=command) as running:
        process = first_process(running)
        running.until(lambda: arguments_of(process)[2:3] == ["samestep"], "the command")
        running.until(lambda: handles_sigterm(process), "the handler, without which the first process ignores SIGTERM")
        time.sleep(seconds)
        with nothing_left_behind(running, tmp_path):
            running.kill_process(process, signal.SIGTERM)
            done = wait_for_end(running, time.monotonic())
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
    run = tmp_path / "runs/a"
    assert not run.exists() or steps_saved(run)
    if seconds < 1:
        record_fault("PID 1 of a container receives SIGTERM during its start", "exit code 130")


@pytest.mark.long
def test_pause_of_all_processes_is_no_hang(tmp_path: Path, record_fault: RecordFault) -> None:
    hold = tmp_path / "hold"
    hold.write_text("0 20", encoding="utf-8")
    with Running("train", HOLDING, "--name", "a", "--processes", 2, "--hang-after", "3s", cwd=tmp_path) as running:
        running.until(lambda: _calls(tmp_path, 0) == 20, "call 20")
        processes = running.processes()
        for process in processes:
            running.kill_process(process, signal.SIGSTOP)
        time.sleep(6)
        hold.unlink()
        for process in processes:
            running.kill_process(process, signal.SIGCONT)
        done = running.wait(60)
    assert (done.code, "hang" in done.err) == (0, False), done.err
    (tmp_path / "other").mkdir()
    assert here("train", HOLDING, "--name", "a", cwd=tmp_path / "other") == 0
    assert weights(tmp_path / "runs/a") == weights(tmp_path / "other/runs/a")
    fault = "all processes are stopped for twice the time of --hang-after"
    record_fault(fault, "exit code 0; the same weights")


def _calls(path: Path, rank: int) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in path.glob(f"seen-{rank}-*"))


# --- other users ---


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("flock") is None, reason="only root can be another user")
def test_reader_of_a_run_cannot_lock_it(record_fault: RecordFault) -> None:
    with tempfile.TemporaryDirectory() as text:
        run = Path(text) / "run"
        Path(text).chmod(0o755)
        run.mkdir(mode=0o755)
        FolderLock(run).release()
        command = ["flock", "--nonblock", str(run / ".lock"), "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, user=OTHER_USER, group=OTHER_USER)
        assert "Permission denied" in done.stderr
        assert (run / ".lock").stat().st_mode & 0o777 == 0o600
    record_fault("another user, who may read a run, locks it", "permission denied")


def test_users_who_may_write_a_run_can_lock_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    with FolderLock(shared), (shared / ".lock").open("rb") as file:
        assert (shared / ".lock").stat().st_mode & 0o777 == 0o660
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


# --- recipes and numbers ---

RECIPES = {
    "a YAML alias that contains itself": "data: &a {name: digits, options: *a}",
    "YAML aliases that repeat 3 million values": "a: &a [1, 2, 3, 4, 5, 6, 7]\n"
    + "\n".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcde", "bcdef", strict=True)),
    "a recipe of 2 MB": "# " + 2_000_000 * "x",
}
VALUES = {
    "text in place of the learning rate": ("optimizer.options.lr=abc",),
    "a batch size of 1e11": ("batch_size=100000000000",),
    "1e12 epochs": ("epochs=1000000000000",),
    "100,000 threads": ("step.threads=100000",),
    "100,000 loader workers": ("--workers", 100_000),
    "100,000 processes": ("--processes", 100_000),
}


def refused(path: Path, *arguments: object) -> None:
    began = time.process_time()
    assert here(*arguments, cwd=path) == 2
    assert time.process_time() - began < SECONDS


def require_report(capture: pytest.CaptureFixture[str]) -> None:
    report = capture.readouterr().err
    require_bounded(report)
    assert report.count("error: ") == 1
    assert report.startswith("error: ")


@pytest.mark.parametrize("fault", RECIPES)
def test_hostile_recipe_is_refused(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPES[fault], encoding="utf-8")
    refused(tmp_path, "train", "recipe.yaml")
    require_report(capsys)
    assert not (tmp_path / "runs").exists()
    record_fault(fault, "exit code 2 within 2 s")


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_recipe_that_is_no_file_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    path = tmp_path / "recipe.yaml"
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()
    refused(tmp_path, "train", "recipe.yaml")
    require_report(capsys)
    record_fault(f"a {kind} in place of a recipe", "exit code 2 within 2 s")


@pytest.mark.parametrize("fault", VALUES)
def test_absurd_value_is_refused(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    refused(tmp_path, *TRAIN, *VALUES[fault])
    require_report(capsys)
    assert not (tmp_path / "runs").exists()
    record_fault(fault, "exit code 2 within 2 s")


def test_absurd_number_of_processes_of_a_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").touch()
    refused(tmp_path, "run", "--processes", 100_000, "script.py")
    assert "E_MACHINE" in capsys.readouterr().err
