"""Events of an audited process, and the line of the script that causes one.

Imported at the start of Python (`hooks.py`), and so without imports that take long.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time

TYPE_CHECKING = False  # not from `typing`, which is slow to import
if TYPE_CHECKING:
    from typing import Any

_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}{os.sep}"
_LIBRARIES = (_PACKAGE, f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_SITE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_is_user: dict[str, bool] = {}  # by file


class EventWriter:
    """Writer of the events of this process; a forked process opens its own file in the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = 0
        self._file = -1
        self.world: tuple[str, int, int] | None = None  # identifier, rank, number of ranks

    def write(self, kind: str, **values: Any) -> None:
        """Append one event."""
        if os.getpid() != self._pid:
            self._open()
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"))
        # Unbuffered: a kill would lose buffered lines, and a fork would write them twice.
        os.write(self._file, f"{line}\n".encode())

    def set_world(self, identifier: str, rank: int, size: int) -> None:
        """Assign the following events to a rank of a world."""
        self.world = (identifier, rank, size)
        self.write("world", world=self.world)

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # the file of the process from which this one was forked
        self._pid = os.getpid()
        name = f"{time.time_ns()}-{self._pid}.jsonl"
        flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._file = os.open(os.path.join(self._folder, name), flags, 0o600)
        self.write("process", pid=self._pid, world=self.world, program=sys.argv[0])


def user_line() -> str:
    """Return the innermost line outside of installed packages, as `train.py:40`, or no text."""
    # Not `inspect.stack`, which reads source files and is slow.
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _is_user:
            is_library = file.startswith(_LIBRARIES) or any(part in file for part in _SITE)
            # Generated code, as of a dataclass, has no file.
            _is_user[file] = not is_library and os.path.isfile(file)
        if _is_user[file]:
            return f"{file.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
