"""Programs that a script runs to their end: rank 0 runs them, and the other ranks receive what they have returned.

A program that a script only starts (`subprocess.Popen`), or that a library runs, runs on every
rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.distributed.logging import logger
from samestep.distributed.status import RankStatus
from samestep.errors import RunError
from samestep.launcher.pickling import pack, unpack
from samestep.script.replaced import replaced
from samestep.view.in_step import is_library_file, script_line

_POLL_SECONDS = 0.005


class FirstRankPrograms:
    """Replacements of functions of `subprocess` and of `os.system` on one rank.

    Args:
        rank: this rank.
        folder: temporary folder that all ranks share.
        status: status of this rank, which waits for rank 0.
        has_passed: whether rank 0 is at a later point of the script than this rank.
    """

    def __init__(
        self, rank: int, folder: str, status: RankStatus, has_passed: Callable[[], bool]
    ) -> None:
        self._is_first = rank == 0
        self._folder = Path(folder)
        self._status = status
        self._has_passed = has_passed
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()
        self._run = subprocess.run
        self._system = os.system
        self._start = subprocess.Popen.__init__
        self._is_running = False  # a program that rank 0 alone runs
        self._named: set[tuple[str, int]] = set()  # lines that start programs

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Replace `subprocess.run`."""
        return self._once(lambda: self._run(*arguments, **options))

    def call(self, *arguments: Any, **options: Any) -> int:
        """Replace `subprocess.call`, which `check_call` calls too."""
        return int(subprocess.run(*arguments, check=False, **options).returncode)

    def system(self, command: Any) -> int:
        """Replace `os.system`."""
        return int(self._once(lambda: self._system(command)))

    def start(self, process: Any, args: Any, *arguments: Any, **options: Any) -> None:
        """Replace `subprocess.Popen.__init__`: name a line of the script that starts a program on every rank."""
        if self._is_first and not self._is_running and self._is_of_script():
            line = script_line(sys._getframe())
            if line not in self._named:
                self._named.add(line)
                program = (
                    args if isinstance(args, (str, bytes, os.PathLike)) else next(iter(args), "")
                )
                name = os.fsdecode(program).split(" ")[0]
                logger.info(
                    "%s:%d starts the program %r, on every process",
                    os.path.relpath(line[0]),
                    line[1],
                    name,
                )
        self._start(process, args, *arguments, **options)

    def _is_of_script(self) -> bool:
        """Whether the main thread of the rank runs a program in code of the script, not in that of a library."""
        if (
            os.getpid() != self._process
            or threading.current_thread() is not threading.main_thread()
        ):
            return False
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in (
            "subprocess",
            __name__,
        ):
            frame = frame.f_back
        return not is_library_file(frame.f_code.co_filename)

    def _once(self, program: Callable[[], Any]) -> Any:
        """Return what a program of the script returns on rank 0, or raise its exception."""
        if not self._is_of_script():
            return program()
        file, line = script_line(sys._getframe())
        place = f"{os.path.basename(file)}-{line}"
        self._counts[place] += 1
        path = self._folder / f"program-{place}-{self._counts[place]}"
        if not self._is_first:
            return self._received(path, f"{file}:{line}")
        result: Any = None
        self._is_running = True
        try:
            result = program()
            return result
        except (subprocess.SubprocessError, OSError) as error:
            result = error
            raise
        finally:
            self._is_running = False
            part = path.with_suffix(".part")
            part.write_bytes(pack(result))
            part.rename(path)  # complete or absent

    def _received(self, path: Path, line: str) -> Any:
        is_passed = False
        with self._status.waiting("a program of rank 0"):
            while not path.exists() and not is_passed:
                time.sleep(_POLL_SECONDS)
                is_passed = self._has_passed() and not path.exists()
        result = None if is_passed else unpack(path.read_bytes())
        if result is None:
            raise RunError(
                f"{line}: the program did not run to its end on rank 0",
                expected="a program that rank 0 can run, at the same point of the script",
                fix="read the error of rank 0",
            )
        if isinstance(result, Exception):
            raise result
        return result


@contextmanager
def programs_of_first_rank(programs: FirstRankPrograms) -> Iterator[None]:
    """Let rank 0 alone run the programs that a script runs to their end, inside the block."""

    def start(process: Any, *arguments: Any, **options: Any) -> None:
        programs.start(process, *arguments, **options)

    with (
        replaced(subprocess, run=programs.run, call=programs.call),
        replaced(subprocess.Popen, __init__=start),
        replaced(os, system=programs.system),
    ):
        yield
