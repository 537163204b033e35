"""torchrun restarts three ranks when one is killed, and the run continues from its newest complete checkpoint."""

import os
import re
import signal
from pathlib import Path

import pytest

from helpers.started import free_port, python, ranks
from helpers.system import events, here, until, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
OPTIONS = ("epochs=1",)


def process_of_rank(rank: int, run: Path) -> int:
    """The process that is this rank of the command that trains `run`."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line, environment = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if run.name.encode() in line and b"samestep" in line and f"RANK={rank}".encode() in environment:
                return int(folder.name)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_costs_what_came_after_the_checkpoint(killed: int, tmp_path: Path) -> None:
    name = f"killed-{os.getpid()}-{killed}"
    run, hold = tmp_path / "runs" / name, tmp_path / "hold"
    hold.write_text("0 9", encoding="utf-8")
    torchrun = python("-m", "torch.distributed.run", "--nproc-per-node", "3", "--max-restarts", "1")
    arguments = ["--master-port", free_port(), "-m", "samestep", "train", RECIPE, *OPTIONS, "--name", name]
    command = [*arguments, "--checkpoint-every", 3]
    with ranks(lambda rank, size: {}, 1, *command, cwd=tmp_path, command=torchrun) as started:
        last = run / "checkpoints" / "last"
        until(lambda: last.resolve().name == "step-000000006", "a checkpoint of step 6", 60)
        os.kill(process_of_rank(killed, run), signal.SIGKILL)
        hold.unlink()
        (ended,) = started.wait()
    assert ended.code == 0, str(ended)
    assert [event["step"] for event in events(run, "resume")] == [6]
    assert len(re.findall(r"^evaluated", ended.out, re.MULTILINE)) == 1
    assert here("train", RECIPE, *OPTIONS, "--name", "whole", "--processes", 2, cwd=tmp_path) == 0
    assert weights(run) == weights(tmp_path / "runs" / "whole")
