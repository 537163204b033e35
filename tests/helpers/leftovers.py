"""Script in which rank 1 leaves a process or a thread behind, or blocks; the file `ready` has its process id.

Usage: samestep run --processes 2 leftovers.py KIND
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from samestep.session import start


def block_in_disk_wait() -> None:
    """Wait for a FIFO in the kernel's state `D`, with the interpreter lock: `vfork` waits for its child."""
    os.mkfifo("fifo")
    action = (os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], dict(os.environ), file_actions=[action])


def leave(kind: str) -> None:
    """Leave something behind, or block."""
    if kind in ("subprocess", "exception"):
        subprocess.Popen(["sleep", "1000"])
    elif kind == "session":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    elif kind == "fork" and os.fork() == 0:
        time.sleep(1000)
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(1000,), name="upload").start()
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "in C code":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter lock
    elif kind == "in disk wait":
        block_in_disk_wait()


if __name__ == "__main__":
    with start() as world:
        if world.rank == 1:
            Path("ready").write_text(str(os.getpid()), encoding="utf-8")
            leave(sys.argv[1])
            if sys.argv[1] == "exception":
                raise ArithmeticError("the sum does not add up")
