"""Launchers that are killed while a rank is blocked: by SIGSTOP, in C code, or in the kernel."""

import signal
import time
from contextlib import suppress
from pathlib import Path

from helpers.system import Running, until

SCRIPT = Path(__file__).parent / "leftovers.py"
# The kernel's letter for the state of the blocked rank.
STATES = {"stopped": "T", "in C code": "S", "in disk wait": "D"}
END_SECONDS = 10


def start(path: Path, kind: str, *options: object) -> Running:
    """Start two ranks, the second of which leaves something behind or blocks."""
    return Running("run", "--processes", 2, *options, SCRIPT, kind, cwd=path)


def rank_1(running: Running, path: Path) -> int:
    """Wait for the process id of rank 1."""
    ready = path / "ready"
    running.until(lambda: ready.exists() and ready.read_text(encoding="utf-8"), "rank 1")
    return int(ready.read_text(encoding="utf-8"))


def kill_launcher_of_blocked_rank(path: Path, kind: str) -> None:
    """Kill the launcher while rank 1 is blocked; every process must end within 10 s."""
    with start(path, kind) as running:
        process = rank_1(running, path)
        running.until(lambda: _state(process) == STATES[kind], f"state {STATES[kind]}")
        time.sleep(0.2)
        running.kill(signal.SIGKILL)
        until(lambda: not Path(f"/proc/{process}").exists(), "rank 1 has ended", END_SECONDS)
        with suppress(OSError):  # the child of `vfork`, started by the rank's code, waits for a writer
            (path / "fifo").open("wb").close()
        until(lambda: not running.processes(), "no process is left", END_SECONDS, instead=running.processes)


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
