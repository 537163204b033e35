"""Ranks that another launcher has started tell of a hang as launched ones do, and end."""

import re
import signal
from pathlib import Path

import pytest

from started import as_srun, as_torchrun, free_port, python, ranks
from system import Done, events, here, until, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
SECONDS = 10

# Ranks import at different speeds on a busy machine; what is tried here comes after that.
MEET = """
import os, time
from datetime import timedelta
from pathlib import Path
import samestep

start, place = samestep.start, Path(__file__).parent
(place / f"imported-{os.environ['RANK']}").touch()
while len(list(place.glob("imported-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
"""

SCRIPT = f"""{MEET}
from samestep.runtime import mutual_watch

def leave_late(code, leave=mutual_watch._leave):
    time.sleep(2)
    leave(code)

with start(timeout=timedelta(seconds=3)) as world:
    if world.rank == 0:
        mutual_watch._leave = leave_late
    world.barrier()
    if world.rank == 2:
        time.sleep(1000)
    world.barrier()
"""

ENDS_WELL = f"""{MEET}
for _ in range(2):
    with start(timeout=timedelta(seconds=3)) as world:
        for _ in range(3):
            world.barrier()
            time.sleep(1.2)
time.sleep(3.5)
print("done")
"""


def one_report(ended: list[Done]) -> list[str]:
    """The lines of the one report."""
    (told,) = [each.err for each in ended if each.err]
    assert told.count("error: ") == 1 and "Traceback" not in told
    return told.splitlines()


@pytest.mark.parametrize(
    "stopped", [None, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_rank_that_does_not_come_is_told_once_and_all_end(tmp_path: Path, stopped: int | None) -> None:
    """Rank 1 waits in step 7; or a rank is stopped by a signal, rank 0 with the store of the job too."""
    hold, run = tmp_path / "hold", tmp_path / "runs/a"
    hold.write_text("1 7", encoding="utf-8")
    options = ("--name", "a", "--hang-after", "3s", "--checkpoint-every", 4)
    with ranks(as_srun(f"7{stopped}"), 4, "train", RECIPE, *options, cwd=tmp_path) as started:
        until(lambda: len(events(run, "step")) >= 6, "6 steps", 60)
        until((run / "checkpoints" / "last").exists, "a checkpoint", 60)
        if stopped is not None:
            started.processes[stopped].send_signal(signal.SIGSTOP)
            hold.unlink()
        codes = [process.wait(SECONDS) for rank, process in enumerate(started.processes) if rank != stopped]
        assert set(codes) == {1}
        if stopped is not None:
            started.processes[stopped].kill()
        lines = one_report(started.wait())
    if stopped is None:
        assert re.fullmatch(r"error: rank 1 does not come: nothing has happened for [3-5]\.\d s", lines[0])
        assert lines[1:3] == [
            "    rank 1: in engine.step 7",
            "    ranks 0, 2 and 3: in engine.step 7, waiting in the sum in tree order",
        ]
        assert re.search(r"recorded\.py:\d+ _hold\n  stack of ranks 0, 2 and 3", "\n".join(lines))
    elif stopped == 2:
        assert lines[0].startswith("error: rank 2 does not come: nothing has happened for ")
        assert "since then nothing is heard of its process" in lines[1]
        assert "none: the process does not answer" in "\n".join(lines)
    else:
        assert lines[0].startswith("error: rank 0 does not come: the store of the job, at 127.0.0.1:")
    assert lines[-2].startswith("  rule: every rank reaches the next step within ")
    hold.unlink(missing_ok=True)
    assert here("resume", run, "--processes", 2, cwd=tmp_path) == 0
    assert here("train", RECIPE, "--name", "whole", cwd=tmp_path) == 0
    assert weights(run) == weights(tmp_path / "runs/whole")


@pytest.mark.slow
def test_a_script_of_ones_own_is_watched_too(tmp_path: Path) -> None:
    """Rank 0, torn from its wait by the end of the others, does not tell of that."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with ranks(as_torchrun(free_port()), 4, script, cwd=tmp_path, command=python()) as started:
        ended = started.wait(40)
    assert {each.code for each in ended} == {1}
    lines = one_report(ended)
    assert re.match(r"error: rank 2 does not come: nothing has happened for [3-5]\.", lines[0])
    line_of_sleep = SCRIPT.splitlines().index("        time.sleep(1000)") + 1
    assert any(line.endswith(f"script.py:{line_of_sleep} <module>") for line in lines)


@pytest.mark.slow
def test_who_gets_on_and_who_is_done_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_WELL, encoding="utf-8")
    with ranks(as_torchrun(free_port()), 3, script, cwd=tmp_path, command=python()) as started:
        ended = started.wait(60)
    assert [(each.code, each.out, each.err) for each in ended] == [(0, "done\n", "")] * 3
