"""Other programs of a script: those that run to their end run on rank 0 alone.

The other ranks receive the results. A program that a script only starts (`subprocess.Popen`), or
that a library runs, runs on every rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.distributed.collective_check import Line, is_library_file, script_line
from samestep.distributed.logging import logger
from samestep.distributed.status import RankStatus
from samestep.errors import RunError
from samestep.launcher.pickling import pack, unpack
from samestep.script.patches import PATHS, is_main_thread_of, replaced

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
        self._is_running = False  # a program that rank 0 alone runs
        self._named: set[Line] = set()  # lines that start programs

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let rank 0 alone run the programs that a script runs to their end, inside the block."""
        of_subprocess = subprocess.run
        of_os = os.system
        of_popen = subprocess.Popen.__init__

        def run(*arguments: Any, **options: Any) -> Any:
            return self._once(lambda: of_subprocess(*arguments, **options))

        def call(*arguments: Any, **options: Any) -> int:  # `check_call` calls it too
            return int(subprocess.run(*arguments, check=False, **options).returncode)

        def system(command: Any) -> int:
            return int(self._once(lambda: of_os(command)))

        def start(process: Any, args: Any, *arguments: Any, **options: Any) -> None:
            if self._is_first and not self._is_running and self._is_of_script():
                self._name_program(args)
            of_popen(process, args, *arguments, **options)

        with (
            replaced(subprocess, run=run, call=call),
            # Its method, not the class: libraries derive classes from it.
            replaced(subprocess.Popen, __init__=start),
            replaced(os, system=system),
        ):
            yield

    def _name_program(self, program: Any) -> None:
        """Report a line of the script that starts a program on every rank, once."""
        line = script_line(sys._getframe(1))
        if line in self._named:
            return
        self._named.add(line)
        if not isinstance(program, PATHS):
            program = next(iter(program), "")
        name = os.fsdecode(program).split(" ")[0]
        place = f"{os.path.relpath(line[0])}:{line[1]}"
        logger.info("%s starts the program %r, on every process", place, name)

    def _is_of_script(self) -> bool:
        """Whether the main thread runs a program in code of the script, not of a library."""
        if not is_main_thread_of(self._process):
            return False
        frame = sys._getframe(1)
        passed = ("subprocess", __name__)
        while frame.f_back is not None and frame.f_globals.get("__name__") in passed:
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
        except Exception as error:
            # Also of the text of the output, which need not be in the encoding of the script.
            if type(error).__module__ in ("builtins", "subprocess"):  # others can need arguments
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
                # In this order: rank 0 writes the result before it goes on.
                is_passed = self._has_passed() and not path.exists()
        result = None
        if not is_passed:
            result = unpack(path.read_bytes())
        if result is None:
            raise RunError(
                f"{line}: the program did not run to its end on rank 0",
                expected="a program that rank 0 can run, at the same point of the script",
                fix="read the error of rank 0",
            )
        if isinstance(result, Exception):
            raise result
        return result
