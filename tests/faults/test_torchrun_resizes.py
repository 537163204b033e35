"""Agents of torchrun join and leave a run at random moments: the run continues on 1 to 3 ranks to the same weights."""

import random
import signal
import sys
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pytest

from helpers.resizes import MOST, moves, rank_counts, recipe, require_undisturbed
from helpers.started import free_port
from helpers.surroundings import RecordFault
from helpers.system import IMPORT_PATH, Running, events

SECONDS = 120
WAITS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
# An agent of torch 2.13 that was in an earlier round does not publish its store for an agent that joins.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(port: int, path: Path, epochs: int, *, is_first: bool) -> Running:
    """Start an agent with one rank; the first one has the store of the rendezvous, and stays."""
    return Running(
        *("-m", "torch.distributed.run", f"--nnodes=1:{MOST}", "--nproc-per-node=1", "--max-restarts=1000"),
        *("--monitor-interval=0.5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=samestep"),
        *(f"--rdzv-conf=is_host={str(is_first).lower()},{WAITS}", "--local-addr=127.0.0.1"),
        *("-m", "samestep", "train", *recipe(epochs), "--name", "many", "--or-resume", "--checkpoint-every", 5),
        cwd=path,
        variables=VARIABLES,
        command=[sys.executable],
    )


def end(running: Running, number: signal.Signals) -> None:
    """End an agent by SIGTERM, which its rank receives too, or kill both as a lost host does."""
    if number == signal.SIGTERM:
        running.kill(number)
        return
    for process in running.processes():
        running.try_kill_process(process, number)


def train(path: Path, epochs: int, count: int, seed: int = 0) -> list[int]:
    """Train while agents join and leave `count` times; return the number of ranks of each start."""
    choose, port, run, marker = random.Random(1), free_port(), path / "runs/many", path / "slow"
    marker.touch()
    with ExitStack() as stack:
        first = stack.enter_context(agent(port, path, epochs, is_first=True))
        others = list[Running]()
        for number, (move, place, size) in enumerate(moves(count, ["SIGTERM", "SIGKILL"], seed)):
            steps = len(events(run, "step")) + choose.randrange(1, 4)
            first.until(lambda steps=steps: len(events(run, "step")) >= steps, "progress", SECONDS)
            if move == "join":
                others.append(stack.enter_context(agent(port, path, epochs, is_first=False)))
            else:
                end(others.pop(place - 1), signal.Signals[move])
            if number % 5 != 4:  # otherwise the next change can precede the restart
                first.until(lambda size=size: rank_counts(run)[-1] == size, f"{size} ranks", SECONDS)
        marker.unlink()
        result = first.wait(600)
    assert result.code == 0, result
    require_undisturbed(path, epochs)
    return rank_counts(run)


@pytest.mark.long
def test_an_agent_joins_and_leaves(tmp_path: Path) -> None:
    counts = train(tmp_path, 3, 2, seed=1)  # joins, and is killed
    assert [count for count, _ in groupby(counts)] == [1, 2, 1]  # an agent that joins late restarts the other one


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_resizes(tmp_path: Path, record_fault: RecordFault) -> None:
    assert set(train(tmp_path, 12, 20)) == {1, 2, 3}
    fault = "20 times an agent of torchrun joins, ends by SIGTERM or is killed, `--nnodes=1:3`"
    record_fault(fault, "exit code 0; the same weights")
