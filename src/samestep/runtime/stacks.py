"""Python stacks of ranks, asked for from outside: they come even where a rank is stuck in C code.

`faulthandler` of the standard library writes them from a signal handler, without Python's help.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from multiprocessing.reduction import DupFd
from typing import Any

from samestep.runtime.board import nameless_file

SIGNAL = signal.SIGUSR2
_PATIENCE_SECONDS = 1.0
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_MAIN = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")

# Everything above is how we came to call the function, or to run the script, that was launched.
_ABOVE = re.compile(r"runtime.(rank\.py:\d+ _call|script\.py:\d+ run_script)$")


class StackFile:
    """Where one rank's stacks are written; it can be handed to a process that is being started."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = nameless_file("samestep-stacks") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._descriptor),)

    def listen(self) -> None:
        """In the rank: write all stacks when asked to, and when a fatal signal ends it."""
        faulthandler.enable(self._descriptor)
        faulthandler.register(SIGNAL, self._descriptor, all_threads=True, chain=False)

    def ask(self, process: int) -> list[str]:
        """In the launcher: the frames of a process's main thread, outermost first; none if it does not answer."""
        before = os.fstat(self._descriptor).st_size
        try:
            os.kill(process, SIGNAL)
        except ProcessLookupError:
            return []
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            text = self._read(before)
            time.sleep(0.02)
            if text and text == self._read(before):
                return frames(text)
        return []

    def crash(self) -> list[str]:
        """In the launcher: the frames that a fatal signal left behind, outermost first."""
        return frames(self._read(0))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _read(self, begin: int) -> str:
        size = os.fstat(self._descriptor).st_size - begin
        return os.pread(self._descriptor, size, begin).decode(errors="replace") if size > 0 else ""


def frames(text: str) -> list[str]:
    """`file:line function` of one thread of a dump, outermost first: the crashed one, else the main one.

    Threads are dumped newest first, so the main one is the last; a dump of a crash has the thread that crashed marked
    as current. Where the main thread is asked, it is marked so too. What a rank does before it calls the function that
    was launched is left out.
    """
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        head = _MAIN.match(line)
        if head:
            threads.append((head[1] == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(f"{frame['file']}:{frame['line']} {frame['function']}")
    current = [lines for is_current, lines in threads if is_current]
    chosen = current or [lines for _, lines in threads[-1:]]
    found = chosen[0][::-1] if chosen else []
    ours = [place for place, each in enumerate(found) if _ABOVE.search(each)]
    return found[ours[-1] + 1 :] if ours else found


def _received(handle: Any) -> StackFile:
    return StackFile(handle.detach())
