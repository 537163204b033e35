"""Programs that a script runs to their end: rank 0 runs them, and the other ranks receive what they have returned.

A program that a script only starts (`subprocess.Popen`), or that a library runs, runs on every rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from samestep.distributed.status import RankStatus
from samestep.errors import RunError
from samestep.script.replaced import replaced
from samestep.view.fingerprints import is_library_file, script_line

_POLL_SECONDS = 0.005


class FirstRankPrograms:
    """Replacements of `subprocess.run`, `subprocess.call` and `os.system` on one rank.

    Args:
        rank: this rank.
        folder: temporary folder that all ranks share.
        status: status of this rank, which waits for rank 0.
        unnamed: surrounds a program of rank 0, which the log need not name.
    """

    def __init__(
        self, rank: int, folder: str, status: RankStatus, unnamed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._is_first = rank == 0
        self._folder = Path(folder)
        self._status = status
        self._unnamed = unnamed
        self._counts: Counter[str] = Counter()
        self._process = os.getpid()
        self._run = subprocess.run
        self._system = os.system

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Replace `subprocess.run`."""
        if not self._is_of_script():
            return self._run(*arguments, **options)
        command = options.get("args", arguments[0] if arguments else "")
        if self._is_first:
            with self._sending() as send, self._unnamed():
                try:
                    done = self._run(*arguments, **options)
                except (subprocess.SubprocessError, OSError) as error:
                    send(_fields_of_error(error))
                    raise
                send({"code": done.returncode, "out": _packed(done.stdout), "err": _packed(done.stderr)})
            return done
        fields = self._received()
        if "error" in fields:
            raise _error_of(fields, command)
        streams = _unpacked(fields["out"]), _unpacked(fields["err"])
        done = subprocess.CompletedProcess(command, fields["code"], *streams)
        if options.get("check"):
            done.check_returncode()
        return done

    def call(self, *arguments: Any, **options: Any) -> int:
        """Replace `subprocess.call`, which `check_call` calls too."""
        return int(subprocess.run(*arguments, check=False, **options).returncode)

    def system(self, command: Any) -> int:
        """Replace `os.system`."""
        if not self._is_of_script():
            return self._system(command)
        if self._is_first:
            with self._sending() as send, self._unnamed():
                code = self._system(command)
                send({"code": code})
            return code
        return int(self._received()["code"])

    def _is_of_script(self) -> bool:
        """Whether the main thread of the rank runs a program in code of the script, not in that of a library."""
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return False
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in ("subprocess", __name__):
            frame = frame.f_back
        return not is_library_file(frame.f_code.co_filename)

    def _file(self) -> Path:
        file, line = script_line(sys._getframe(2))
        place = f"{os.path.basename(file)}-{line}"
        self._counts[place] += 1
        return self._folder / f"program-{place}-{self._counts[place]}.json"

    @contextmanager
    def _sending(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yield a function that sends what a program has returned; an unknown exception is sent as one."""
        file = self._file()
        sent: list[dict[str, Any]] = []
        try:
            yield sent.append
        finally:
            fields = sent[0] if sent else {"error": "RunError", "text": "the program failed on rank 0"}
            part = file.with_suffix(".part")
            part.write_text(json.dumps(fields), encoding="utf-8")
            part.rename(file)  # complete or absent

    def _received(self) -> dict[str, Any]:
        file = self._file()
        with self._status.waiting("a program of rank 0"):
            while not file.exists():
                time.sleep(_POLL_SECONDS)
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return fields


@contextmanager
def programs_of_first_rank(programs: FirstRankPrograms) -> Iterator[None]:
    """Let rank 0 alone run the programs that a script runs to their end, inside the block."""
    with ExitStack() as stack:
        stack.enter_context(replaced(subprocess, run=programs.run, call=programs.call))
        stack.enter_context(replaced(os, system=programs.system))
        yield


def _packed(stream: Any) -> Any:
    return {"bytes": stream.hex()} if isinstance(stream, bytes) else stream


def _unpacked(stream: Any) -> Any:
    return bytes.fromhex(stream["bytes"]) if isinstance(stream, dict) else stream


def _fields_of_error(error: Exception) -> dict[str, Any]:
    fields: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, subprocess.CalledProcessError):
        fields |= {"code": error.returncode, "out": _packed(error.output), "err": _packed(error.stderr)}
    elif isinstance(error, subprocess.TimeoutExpired):
        fields |= {"seconds": error.timeout, "out": _packed(error.output), "err": _packed(error.stderr)}
    elif isinstance(error, OSError):
        fields |= {"number": error.errno, "text": error.strerror, "file": str(error.filename)}
    return fields


def _error_of(fields: dict[str, Any], command: Any) -> Exception:
    """Return the exception of rank 0 for this rank."""
    streams = _unpacked(fields.get("out")), _unpacked(fields.get("err"))
    if "code" in fields:
        return subprocess.CalledProcessError(fields["code"], command, *streams)
    if "seconds" in fields:
        return subprocess.TimeoutExpired(command, fields["seconds"], *streams)
    if "number" in fields:
        return OSError(fields["number"], fields["text"], fields["file"])
    return RunError(fields["text"], expected="a program that rank 0 can run", fix="read the error of rank 0")
