"""Ranks end with their launcher."""

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.recorded import count_calls
from helpers.started import as_srun, free_port, python
from helpers.surroundings import END_SECONDS, RecordFault
from helpers.system import COMMAND, TESTS, Running, here, state_of, until, weights

RECIPE = TESTS / "helpers" / "recorded.yaml"
TRAIN = ("train", RECIPE, "--name", "a")
# Starts one command per set of variables, as srun does, and waits.
LAUNCHER = """
import json, os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[2:], env={**os.environ, **variables}) for variables in json.loads(sys.argv[1])]
for rank in ranks:
    rank.wait()
"""


def launcher(name: str) -> list[str]:
    """Return a command that starts two ranks of the command that follows."""
    if name == "torchrun":
        port = str(free_port())
        return python("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "-m", "samestep")
    variables: list[Mapping[str, str]] = [as_srun("815")(rank, 2) for rank in range(2)]
    return [sys.executable, "-c", LAUNCHER, json.dumps(variables), *COMMAND]


@pytest.mark.parametrize(
    ("name", "is_stuck"),
    [
        pytest.param("torchrun", False, marks=pytest.mark.slow),
        pytest.param("torchrun", True, marks=pytest.mark.long),
        pytest.param("srun", False, marks=pytest.mark.long),
    ],
)
def test_ranks_end_with_their_launcher(
    name: str, is_stuck: bool, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    hold, run = tmp_path / "hold", tmp_path / "runs/a"
    hold.write_text("0 20", encoding="utf-8")
    with Running(*TRAIN, "--processes", 2, "--checkpoint-every", 3, cwd=tmp_path, command=launcher(name)) as running:
        running.until(lambda: count_calls(tmp_path) == 20, "call 20")
        running.kill(signal.SIGKILL)
        began = time.monotonic()
        if not is_stuck:
            hold.unlink()
        until(lambda: not running.processes(), "the ranks have ended", END_SECONDS, running.processes)
        seconds = time.monotonic() - began
        done = running.wait(5)
    assert done.err.count("error: ") == 1, done.err
    assert "E_LAUNCHER_GONE" in done.err
    step = state_of(run)["step"]
    hold.unlink(missing_ok=True)
    assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == undisturbed
    stuck = ", while a rank is stuck" if is_stuck else ""
    record_fault(f"{name} is killed{stuck}", "the ranks ended; resumed on 1: the same weights")
    assert seconds < END_SECONDS
    assert step >= (3 if is_stuck else 9), "a rank that is not stuck saves before it ends"


@pytest.mark.long
def test_ranks_that_wait_for_others_end_with_their_launcher(tmp_path: Path, record_fault: RecordFault) -> None:
    variables = json.dumps([as_srun("816")(0, 2)])  # rank 1 is missing
    command = [sys.executable, "-c", LAUNCHER, variables, *COMMAND]
    with Running(*TRAIN, "--processes", 2, cwd=tmp_path, command=command) as running:
        running.until(lambda: len(running.processes()) == 2, "the rank")
        time.sleep(6)  # it imports, then waits for rank 1
        running.kill(signal.SIGKILL)
        until(lambda: not running.processes(), "the rank has ended", END_SECONDS, running.processes)
    record_fault("srun is killed while a rank waits for others", "the ranks ended")
