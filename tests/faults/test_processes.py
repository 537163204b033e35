"""All processes of a run end with the run, and the first cause is reported once."""

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.recorded import count_calls
from helpers.system import Running, arguments_of, events, state_of, until, weights, without_warnings

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
NO_PROCESS = "every process of the run has ended"
LISTENING = "0A"


def hold(place: Path, *, rank: int, call: int) -> Path:
    """Make a rank of the next command wait in a training call of its loss while the returned file is there."""
    path = place / "hold"
    path.write_text(f"{rank} {call}", encoding="utf-8")
    return path


def in_call(running: Running, place: Path, number: int, *, ranks: int) -> None:
    """Wait until rank 0 is in a call, and every other rank has begun."""
    running.until(
        lambda: count_calls(place, 0) == number and all(count_calls(place, rank) for rank in range(ranks)),
        f"call {number}",
    )


def train(place: Path, *arguments: object, name: str = "a") -> Running:
    return Running("train", RECIPE, "--name", name, *arguments, cwd=place)


def none_left(running: Running, timeout: float = 30) -> None:
    until(lambda: not running.processes(), NO_PROCESS, timeout)


@pytest.mark.slow
def test_exception_in_one_rank_is_told_once_with_its_own_traceback(tmp_path: Path) -> None:
    fault = ("loss.name=helpers.recorded:failing", "loss.options={rank: 1, call: 3}")
    with train(tmp_path, "--processes", 3, "--workers", 1, *fault) as running:
        running.until(lambda: count_calls(tmp_path, 1) == 3, "the call that fails")
        done = running.wait(60)
        assert done.code == 1
        assert done.out == ""
        lines = without_warnings(done.err)
        problem = "ArithmeticError: the sum does not add up"
        assert lines[0] == f"error: rank 1 failed in step 3: {problem} [E_RANK_FAILED]"
        assert lines[1] == "    Traceback (most recent call last):"
        assert "recorded.py" in done.err
        assert lines[-1] == f"    {problem}"
        assert done.err.count("Traceback") == done.err.count("raise ArithmeticError") == 1
        none_left(running)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_exception_in_a_dataset_is_told_with_its_sample(tmp_path: Path, workers: int) -> None:
    fault = ("data.name=helpers.recorded:load_broken", "data.options={}")
    with train(tmp_path, "--processes", 3, "--workers", workers, *fault) as running:
        done = running.wait(60)
        assert done.code == 1
        assert done.out == ""
        assert re.match(r"error: rank \d failed [^:]*: KeyError: ", without_warnings(done.err)[0])
        assert done.err.count('raise KeyError("no such colour")') == 1
        assert "while loading sample 40 of the dataset" in done.err
        none_left(running)


@pytest.mark.long
def test_launcher_that_is_killed_while_its_ranks_start_leaves_no_process(tmp_path: Path) -> None:
    hold(tmp_path, rank=0, call=1)
    with train(tmp_path, "--processes", 2, "--workers", 1) as running:
        running.until(lambda: len(running.processes()) >= 4, "a rank")
        running.kill(signal.SIGKILL)
        none_left(running)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_request_to_end_to_all_processes_ends_at_a_step_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal sends Ctrl-C, and a batch system SIGTERM."""
    file = hold(tmp_path, rank=0, call=7)
    with train(tmp_path, "--processes", 2, "--workers", 1) as running:
        in_call(running, tmp_path, 7, ranks=2)
        running.kill_group(number)
        time.sleep(0.2)
        running.must_run()
        file.unlink()
        done = running.wait(60)
        assert done.code == 130
        assert "Traceback" not in done.err
        assert done.err.count("stopping; press Ctrl-C") == (number == signal.SIGINT)
        run = tmp_path / "runs" / "a"
        step = state_of(run)["step"]
        assert 4 <= step < 13
        assert [event["step"] for event in events(run, "step")] == list(range(1, step + 1))
        assert f"samestep resume {run.relative_to(tmp_path)}" in done.out
        none_left(running)


# Launcher and resource tracker; then the fork server, which imports; then the first rank.
STAGES = [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", STAGES)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_request_to_end_during_start_up_ends_and_leaves_nothing(
    tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    file = hold(tmp_path, rank=0, call=1)
    with train(tmp_path, "--processes", 3) as running:
        running.until(lambda: len(running.processes()) >= processes, f"{processes} processes")
        running.kill_group(number)
        time.sleep(0.2)
        file.unlink()
        done = running.wait(20)
        assert done.code == 130
        assert "Traceback" not in done.err
        none_left(running)
    run = tmp_path / "runs" / "a"
    assert (run / "checkpoints" / "last").exists() or not run.exists(), "neither can it be resumed nor started again"


@pytest.mark.slow
def test_a_fork_server_that_is_killed_while_ranks_start_is_told(tmp_path: Path) -> None:
    with train(tmp_path, "--processes", 2) as running:
        running.until(lambda: servers(running), "the fork server")
        running.until((tmp_path / "runs" / "a" / "recipe.yaml").exists, "the run")  # ranks start next
        (server,) = servers(running)
        running.kill_process(server, signal.SIGSTOP)
        stacks = "samestep-stacks"  # a file of the launcher for each rank
        running.until(lambda: any(stacks in name for name in handles(running.launcher)), "the request of a rank")
        time.sleep(0.3)
        running.kill_process(server, signal.SIGKILL)
        done = running.wait(20)
        assert done.code == 1
        message = "error: the fork server of the ranks was killed while they were started, and they ended with it"
        assert done.err.splitlines()[0] == f"{message} [E_LAUNCHER_GONE]"
        assert "Traceback" not in done.err
        none_left(running)


def servers(running: Running) -> list[int]:
    """The process that ranks are forks of, as long as there are none."""
    return [process for process in running.processes() if "forkserver" in " ".join(arguments_of(process))]


def handles(process: int) -> list[str]:
    """Return the targets of the open files of a process."""
    found = []
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed while we looked
            found.append(str(handle.readlink()))
    return found


def shared_memory(processes: list[int]) -> set[Path]:
    """The files of shared memory that these processes have mapped, those that have no name any more included."""
    mapped = ""
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            mapped += Path(f"/proc/{process}/maps").read_text()
    return {Path(name) for name in re.findall(r"/dev/shm/\S+", mapped)}


def listening(processes: list[int]) -> dict[str, list[str]]:
    """Addresses, as the kernel writes them, on which these processes listen, by kind of socket."""
    inodes = {found for process in processes for found in re.findall(r"socket:\[(\d+)\]", " ".join(handles(process)))}
    addresses: dict[str, list[str]] = {}
    for kind in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{processes[0]}/net/{kind}").read_text().splitlines()[1:]]
        addresses[kind] = [row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes]
    return addresses


@pytest.mark.long
def test_two_runs_at_once_keep_to_themselves(tmp_path: Path) -> None:
    """They listen on the loopback interface only, do not clash, and leave no shared memory."""
    places = [tmp_path / "one", tmp_path / "two"]
    files, shared = [], set()
    for place in places:
        place.mkdir()
        files.append(hold(place, rank=0, call=3))
    arguments = ("--processes", 3, "--workers", 1, "epochs=1")
    with train(places[0], *arguments) as one, train(places[1], *arguments) as two:
        for place, running in zip(places, (one, two), strict=True):
            in_call(running, place, 3, ranks=3)
            addresses = listening(running.processes())
            assert addresses["tcp"], "no process listens, so the test would prove nothing"
            assert set(addresses["tcp"]) <= {"0100007F"}
            assert set(addresses["tcp6"]) <= {"00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
            shared |= shared_memory(running.processes())
        for file in files:
            file.unlink()
        for running in (one, two):
            done = running.wait(30)
            assert done.code == 0, done.err
            none_left(running)
    assert weights(places[0] / "runs" / "a") == weights(places[1] / "runs" / "a")
    assert shared, "no memory was shared, so this shows nothing"
    assert not [file for file in shared if file.exists()]


def test_listening_sees_a_socket_that_is_open_to_all() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert {"00000000", "0100007F"} <= set(listening([os.getpid()])["tcp"])
