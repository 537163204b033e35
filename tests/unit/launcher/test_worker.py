"""Worker processes: names in lists of processes, and reports of early ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import samestep
from samestep.launcher.failure import RankError
from samestep.reduce.exact import communicate
from samestep.session import start

RANKS = 3
pools: list[ProcessPoolExecutor] = []


def process_names() -> list[list[str]]:
    """Return the name, the command line and the begin of the environment of each rank, as other programs see them."""
    with start(device="cpu") as world:
        texts = [Path("/proc/self", name).read_bytes() for name in ("comm", "environ")]
        return samestep.all_gather([text.decode(errors="replace") for text in texts], world)


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_ranks_have_names() -> None:
    processes = samestep.launch(process_names, processes=RANKS)
    assert [name for name, _ in processes] == [f"samestep-{rank}\n" for rank in range(RANKS)]
    assert all("PATH=" in environment for _, environment in processes)


def variables_here() -> dict[str, str]:
    return dict(os.environ)


def test_ranks_have_the_environment_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED_LATER", "1")
    samestep.launch(os.getpid, processes=1)  # the fork server runs from here on, if not before
    monkeypatch.delenv("REMOVED_LATER")
    monkeypatch.setenv("SET_LATER", "2")
    variables = samestep.launch(variables_here, processes=1)
    assert "REMOVED_LATER" not in variables
    assert variables["SET_LATER"] == "2"


def write_later(path: Path) -> None:
    time.sleep(0.5)
    path.write_text("done", encoding="utf-8")


def leave_children(folder: Path) -> None:
    with start(device="cpu") as world:
        multiprocessing.get_context("fork").Process(target=write_later, args=(folder / f"{world.rank}",)).start()
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
        pool.submit(write_later, folder / f"pool-{world.rank}")
        pools.append(pool)  # open until the interpreter ends


def test_rank_waits_for_its_child_processes(tmp_path: Path) -> None:
    samestep.launch(leave_children, tmp_path, processes=2)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "pool-0", "pool-1"}


@pytest.mark.parametrize("end", [sys.exit, os._exit])
def test_negative_exit_code_is_neither_a_signal_nor_the_end_of_the_fork_server(end: Callable[[int], None]) -> None:
    with pytest.raises(RankError) as caught:
        samestep.launch(end, -1, processes=1)
    assert caught.value.code == "E_RANK_EXITED"
    assert caught.value.value.startswith("rank 0 ended with exit code 255, before the function returned")


def test_invalid_log_folder_is_named() -> None:
    with pytest.raises(RankError) as caught:
        samestep.launch(time.sleep, 0, processes=2, log_dir=Path("/proc/none"))
    assert caught.value.value.startswith("rank 1 failed: FileNotFoundError: [Errno 2]")
    assert "/proc/none" in caught.value.value


@pytest.mark.parametrize("failing", [False, True])
def test_script_that_ranks_cannot_import(failing: bool, tmp_path: Path) -> None:
    text = "import samestep\ndef value():\n    return 1\n"
    text += 'if __name__ != "__main__":\n    raise OSError("no data")\n' if failing else ""
    (tmp_path / "train.py").write_text(f"{text}samestep.launch(value, processes=1)\n", encoding="utf-8")
    command = [sys.executable, tmp_path / "train.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert ("OSError: no data" in done.stderr) == failing
    assert done.stderr.count("Traceback") == 1 + failing  # of the launch, and of the import
    assert ("[E_RANK_EXITED]" if failing else "[E_LAUNCH]") in done.stderr
    assert done.stderr.splitlines()[-1].endswith('below `if __name__ == "__main__":`') != failing


@pytest.mark.slow
def test_script_that_launches_while_ranks_import_it(tmp_path: Path) -> None:
    """A recipe, an error that the script catches, a launch by a module of the script: no rank goes on."""
    (tmp_path / "helper.py").write_text("import samestep\nsamestep.launch(print, 1, processes=2)\n")
    (tmp_path / "module.py").write_text("import helper\n")
    (tmp_path / "recipe.py").write_text("import samestep\nsamestep.train('digits', processes=2, name='first')\n")
    text = (
        "import samestep\ntry:\n    samestep.launch(print, 1, processes=2)\nfinally:\n    open('end', 'a').write('.')\n"
    )
    (tmp_path / "caught.py").write_text(text)
    for name in ("module", "recipe", "caught"):
        command = [sys.executable, f"{name}.py"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode != 0
        assert done.stderr.count("[E_LAUNCH]") == 1, done.stderr
        assert done.stderr.count("Traceback") == 1
        assert len(done.stderr.splitlines()) < 40
    assert (tmp_path / "end").read_text() == "."


def killed_while_the_fork_server_is_stopped() -> None:
    with start(device="cpu") as world:
        if world.rank == 1:
            server = os.getppid()
            os.kill(server, signal.SIGSTOP)
            # Longer than other ranks have time for their reports.
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {server}"], close_fds=True)
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()


def test_kill_that_is_noticed_late_is_the_cause_of_lost_connections() -> None:
    """Under load, the fork server reports the end of a process late."""
    with pytest.raises(RankError) as caught:
        samestep.launch(killed_while_the_fork_server_is_stopped, processes=2)
    assert (caught.value.code, caught.value.failure.rank) == ("E_RANK_KILLED", 1)


def report_slowly() -> None:
    with start(device="cpu") as world:
        assert world.sockets is not None
        if world.rank == 1:
            raise ValueError(_SlowText())
        communicate(world, [], [(torch.zeros(1), 1)])


class _SlowText:
    """Text of an exception that takes longer than other ranks have for their reports."""

    def __str__(self) -> str:
        time.sleep(0.6)
        return "slow"


def test_slow_report_of_the_cause_is_awaited() -> None:
    with pytest.raises(RankError) as caught:
        samestep.launch(report_slowly, processes=2)
    assert (caught.value.code, caught.value.failure.rank) == ("E_RANK_FAILED", 1)
