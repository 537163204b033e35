"""Peer watchdog: ranks of another launcher report a hang once, and all end."""

import re
import signal
from pathlib import Path

import pytest

from helpers.started import as_srun, as_torchrun, free_port, python, ranks
from helpers.system import Done, events, here, until, weights, without_warnings

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
SECONDS = 90  # a limit that only a failed test reaches: a busy machine needs several seconds to end

# Ranks import at different speeds on a busy machine: wait until all have imported.
IMPORT = """
import os, time
from datetime import timedelta
from pathlib import Path
import samestep

from samestep.session import start

folder = Path(__file__).parent
(folder / f"imported-{os.environ['RANK']}").touch()
while len(list(folder.glob("imported-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
"""

SCRIPT = f"""{IMPORT}
from samestep.launcher import peer_watchdog

def exit_late(code, exit_now=peer_watchdog.exit_process):
    time.sleep(2)
    exit_now(code)

with start(timeout=timedelta(seconds=8)) as world:
    if world.rank == 0:
        peer_watchdog.exit_process = exit_late
    world.barrier()
    if world.rank == 2:
        time.sleep(1000)
    world.barrier()
"""

HEALTHY = f"""{IMPORT}
for _ in range(2):
    with start(timeout=timedelta(seconds=6)) as world:
        for _ in range(3):
            world.barrier()
            time.sleep(1.2)
time.sleep(6.5)
print("done")
"""


def one_report(ended: list[Done]) -> list[str]:
    """Return the lines of the only report."""
    (lines,) = filter(None, [without_warnings(done.err) for done in ended])
    report = "\n".join(lines)
    assert report.count("error: ") == 1 and "Traceback" not in report
    return lines


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(0, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.long),
    ],
)
def test_hang_is_reported_once_and_all_ranks_end(tmp_path: Path, stopped: int | None) -> None:
    """Rank 1 hangs in step 7, or a signal stops a rank; rank 0 hosts the store."""
    hold, run = tmp_path / "hold", tmp_path / "runs/a"
    hold.write_text("1 7", encoding="utf-8")
    # The imports and the trial of four ranks on a busy machine take many seconds, which must not count as a hang.
    options = ("--name", "a", "--hang-after", "30s", "--checkpoint-every", 4)
    with ranks(as_srun("70"), 4, "train", RECIPE, *options, cwd=tmp_path) as started:

        def is_at_hold() -> bool:
            started.must_run()
            return len(events(run, "step")) >= 6 and (run / "checkpoints" / "last").exists()

        until(is_at_hold, "6 steps and a checkpoint", 150)
        if stopped is not None:
            started.processes[stopped].send_signal(signal.SIGSTOP)
            hold.unlink()
        codes = [process.wait(SECONDS) for rank, process in enumerate(started.processes) if rank != stopped]
        assert set(codes) == {1}
        if stopped is not None:
            started.processes[stopped].kill()
        lines = one_report(started.wait())
    if stopped is None:
        assert re.fullmatch(r"error: rank 1 hangs: no progress for \d+\.\d s \[E_HANG\]", lines[0])
        assert lines[1:3] == [
            "    rank 1: in step 7",
            "    ranks 0, 2 and 3: in step 7, waiting in a word of each rank",
        ]
        assert re.search(r"recorded\.py:\d+ _wait_while_blocked\n  stack of ranks 0, 2 and 3", "\n".join(lines))
    elif stopped == 2:
        assert lines[0].startswith("error: rank 2 hangs: no progress for ")
        assert "no status since then" in lines[1]
        assert "none: the process does not answer" in "\n".join(lines)
    else:
        assert lines[0].startswith("error: rank 0 hangs: the store of the job, at 127.0.0.1:")
    assert lines[-2].startswith("  expected: every rank completes a step within ")
    hold.unlink(missing_ok=True)
    assert here("resume", run, "--processes", 2, cwd=tmp_path) == 0
    assert here("train", RECIPE, "--name", "undisturbed", cwd=tmp_path) == 0
    assert weights(run) == weights(tmp_path / "runs/undisturbed")


@pytest.mark.long
@pytest.mark.slow
def test_script_of_the_user_is_watched(tmp_path: Path) -> None:
    """Rank 0, whose barrier fails when the others end, does not report that failure."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with ranks(as_torchrun(free_port()), 4, script, cwd=tmp_path, command=python()) as started:
        ended = started.wait(40)
    assert {done.code for done in ended} == {1}
    lines = one_report(ended)
    assert re.match(r"error: rank 2 hangs: no progress for \d+\.", lines[0])
    line_of_sleep = SCRIPT.splitlines().index("        time.sleep(1000)") + 1
    assert any(line.endswith(f"script.py:{line_of_sleep} <module>") for line in lines)


@pytest.mark.long
@pytest.mark.slow
def test_healthy_and_finished_ranks_are_not_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEALTHY, encoding="utf-8")
    with ranks(as_torchrun(free_port()), 3, script, cwd=tmp_path, command=python()) as started:
        ended = started.wait(60)
    assert [(done.code, done.out, done.err) for done in ended] == [(0, "done\n", "")] * 3
