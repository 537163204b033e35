"""Original functions of files, a journal of changes, and files that every rank has for itself."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import shutil
import sqlite3
import stat
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from samestep.distributed.env import library_caches
from samestep.view.in_step import is_library_file, script_line

_OS_NAMES = (
    "stat statvfs lstat access readlink listdir scandir listxattr getxattr chdir getcwd mkdir makedirs rename replace "
    "remove unlink rmdir symlink link truncate utime chmod chown lchown setxattr removexattr"
)
# The functions of this process before a replacement; not names of this module, which would be
# replaced too.
REAL = SimpleNamespace(
    open=builtins.open,
    descriptor=os.open,
    mkstemp=tempfile._mkstemp_inner,  # type: ignore[attr-defined]
    mkdtemp=tempfile.mkdtemp,
    connect=sqlite3.connect,
    **{name: getattr(os, name) for name in _OS_NAMES.split() if hasattr(os, name)},
)
PATHS = (str, bytes, os.PathLike)
READING = frozenset({"r", "rb", "br", "rt", "tr"})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNNAMED = getattr(os, "O_TMPFILE", 0) or -1  # contains O_DIRECTORY
# Nothing in these folders is made by a script.
_SYSTEM = (
    "/dev/",
    "/proc/",
    "/sys/",
    "/usr/",
    "/bin/",
    "/sbin/",
    "/lib/",
    "/lib64/",
    "/etc/",
    "/run/",
)
_DEVICES = _SYSTEM[:3]


class ThreadLock:
    """Reentrant lock between the threads of a process; in a forked process it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if self._process != os.getpid():  # another thread may have held it at the fork
            self._lock = threading.RLock()
            self._process = os.getpid()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Journal:
    """File to which several processes append lines, each a list as JSON."""

    def __init__(self, path: str) -> None:
        self._descriptor = REAL.descriptor(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        self._end = 0  # of the lines that were read
        self._lock = ThreadLock()
        weakref.finalize(
            self, os.close, self._descriptor
        )  # not earlier: threads may wait for a line

    def append(self, *entry: Any) -> None:
        """Append a line at once."""
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def has_grown(self) -> bool:
        """Whether there are lines that `update` has not read."""
        return (
            os.lseek(self._descriptor, 0, os.SEEK_END) != self._end
        )  # no reader or writer uses the position

    def update(self, apply: Callable[..., None]) -> None:
        """Call `apply(*entry)` for each new line."""
        with self._lock:
            lines = os.pread(
                self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_END) - self._end, self._end
            )
            complete = lines[: lines.rfind(b"\n") + 1]
            for line in complete.splitlines():
                apply(*json.loads(line))
            self._end += len(complete)


class Exchanges:
    """Number of exchanges that a rank has begun, in a file for other processes."""

    def __init__(self, path: str) -> None:
        self._descriptor = REAL.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._number = 0
        weakref.finalize(self, os.close, self._descriptor)

    def advance(self) -> None:
        """Count an exchange that this rank begins."""
        self._number += 1
        os.pwrite(self._descriptor, self._number.to_bytes(8), 0)

    def read(self) -> int:
        """Return the number."""
        return int.from_bytes(os.pread(self._descriptor, 8, 0))


class NotedFile(io.FileIO):
    """File that calls a function after it was closed, in the process that opened it."""

    on_close: Callable[[], None] | None = None
    process = 0

    def close(self) -> None:
        """Close the file."""
        is_open = not self.closed
        super().close()
        if is_open and self.on_close is not None and self.process == os.getpid():
            self.on_close()


How = tuple[
    str, int, str | None, str | None, str | None
]  # mode, buffering, encoding, errors, newline


def noted_file(name: Any, target: str, how: How, on_close: Callable[[], None] | None = None) -> Any:
    """Open the file `target` as `open(name, mode, buffering, encoding, errors, newline)` does; see `NotedFile`."""
    mode, buffering, encoding, errors, newline = how
    raw = NotedFile(
        os.fspath(name),
        re.sub("[bt]", "", mode),
        opener=lambda _, flags: REAL.descriptor(target, flags, 0o666),
    )
    raw.on_close = on_close
    raw.process = os.getpid()
    if buffering == 0:
        return raw
    size = (
        buffering
        if buffering > 1
        else max(io.DEFAULT_BUFFER_SIZE, os.fstat(raw.fileno()).st_blksize)
    )
    kind: Any = (
        io.BufferedRandom
        if "+" in mode
        else io.BufferedReader
        if "r" in mode
        else io.BufferedWriter
    )
    buffer = kind(raw, size)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def open_function(
    open_path: Callable[[Any, How], Any], is_active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return the replacement of `open`, which calls `open_path` with a path and valid arguments while it is active."""

    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        how = (mode, buffering, encoding, errors, newline)
        if opener is not None or not isinstance(file, PATHS) or not is_active():
            return REAL.open(file, *how, closefd, opener)
        if mode not in READING:
            REAL.open(
                os.devnull, mode.replace("x", "w"), *how[1:]
            ).close()  # raises an error of the arguments
        return open_path(file, how)

    return open


def clear(path: str) -> None:
    """Remove a file or link, unless there is none."""
    with suppress(FileNotFoundError):
        REAL.unlink(path)


def copy_file(source: str, target: str, most: float) -> bool:
    """Copy a file with its mode and times; of a file of more than `most` bytes only the size, without blocks.

    Returns:
        Whether the content was copied.
    """
    state = REAL.stat(source)
    clear(target)
    with REAL.open(source, "rb") as old, REAL.open(target, "wb") as new:
        if state.st_size <= most:
            shutil.copyfileobj(old, new, 1 << 20)
        else:
            new.truncate(state.st_size)
    REAL.chmod(target, stat.S_IMODE(state.st_mode))
    REAL.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
    return bool(state.st_size <= most)


def make_folders(path: str) -> None:
    """Make a folder and those above it, unless they exist."""
    try:
        REAL.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        make_folders(path)


def below(path: str) -> list[str]:
    """Return a path and all paths below it, a folder before its content."""
    paths = [path]
    for folder, folders, files in os.walk(path):
        paths += [f"{folder}/{name}" for name in (*folders, *files)]
    return paths


def begins_again(mode: str) -> bool:
    """Whether a file opened in this mode is written from its beginning, and its memory is not mapped."""
    return not set("ar+") & set(mode)


def key_of(path: str) -> str:
    """Return the path without numbers and names of `tempfile`, which can differ between ranks."""
    return re.sub("tmp[a-z0-9_]{8}|[0-9]+", "#", path)


def listing_of(folder: str) -> str:
    """Return the name of the listings of a folder by the current line of the script."""
    file, line = script_line(sys._getframe(1))
    return f"{folder} {file}:{line}"


class _Local(threading.local):
    depth = 0  # of calls of `passing`
    is_quiet = False  # what does not exist is no reason to wait for rank 0


class Exemptions:
    """Files that each rank uses for itself, at their real paths.

    Those of the system, caches of libraries, which several processes may fill, bytecode, and
    temporary files in the default folder, each with its own random name.

    Attributes:
        local: state of the current thread.
    """

    def __init__(self, folder: str) -> None:
        self.local = _Local()
        self._temporary_folder = f"{os.path.realpath(tempfile.gettempdir())}/"
        self._temporary: set[str] = set()
        caches = (os.path.realpath(path) for path in library_caches(tempfile.gettempdir()))
        self._real = (*_DEVICES, f"{os.path.realpath(folder)}/", *caches)
        self._system = (
            *_SYSTEM,
            f"{sys.prefix}/",
            f"{sys.base_prefix}/",
            f"{sysconfig.get_path('stdlib')}/",
        )

    def covers(self, path: str) -> bool:
        """Whether a path without links is used by each rank for itself."""
        return path.startswith(self._real) or "/__pycache__" in path or self._is_temporary(path)

    def _is_temporary(self, path: str) -> bool:
        folder = self._temporary_folder
        is_named = (
            path.startswith(folder) and path[len(folder) :].partition("/")[0] in self._temporary
        )
        return is_named or self.local.depth > 0

    def passing(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function whose own files are exempt in this thread."""
        self.local.depth += 1
        try:
            return function(*arguments, **options)
        finally:
            self.local.depth -= 1

    def is_foreign(self, path: str) -> bool:
        """Whether nothing that rank 0 prepares has this path, or an import of a library asks for it."""
        if (
            path.startswith(self._system)
            or "/<" in path
            or "-packages/" in path
            or self._is_temporary(path)
        ):
            return True
        frame = sys._getframe(1)
        while frame is not None and is_library_file(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def mkstemp(self, folder: Any, *arguments: Any) -> Any:
        """Replace `tempfile._mkstemp_inner`."""
        return self._made(folder, REAL.mkstemp, folder, *arguments)

    def mkdtemp(self, suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        """Replace `tempfile.mkdtemp`."""
        return self._made(dir or self._temporary_folder, REAL.mkdtemp, suffix, prefix, dir)

    def _made(self, folder: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        place = f"{os.path.realpath(os.fsdecode(folder))}/"
        if place != self._temporary_folder and not self.covers(place):
            return function(*arguments)
        made = self.passing(function, *arguments)
        path = os.fsdecode(made[1] if isinstance(made, tuple) else made)
        if place == self._temporary_folder:
            self._temporary.add(os.path.basename(path))
        return made
