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
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from samestep.distributed.collective_check import is_library_file, line_of_script
from samestep.distributed.env import library_caches
from samestep.script.patches import PATHS

_OS_NAMES = (
    "stat statvfs lstat access readlink listdir scandir listxattr getxattr chdir getcwd mkdir "
    "makedirs rename replace remove unlink rmdir symlink link truncate utime chmod chown lchown "
    "setxattr removexattr"
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
READING = frozenset({"r", "rb", "br", "rt", "tr"})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNNAMED = getattr(os, "O_TMPFILE", 0) or -1  # contains O_DIRECTORY
# Nothing in these folders is made by a script.
_DEVICES = ("/dev/", "/proc/", "/sys/")
_SYSTEM = (*_DEVICES, "/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/etc/", "/run/")


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
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = REAL.descriptor(path, flags, 0o600)
        self._end = 0  # of the lines that were read
        self._lock = ThreadLock()
        weakref.finalize(self, os.close, self._descriptor)  # not earlier: threads may wait

    def append(self, *entry: Any) -> None:
        """Append a line at once."""
        # One write: lines of several processes and threads do not mix.
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def has_grown(self) -> bool:
        """Whether there are lines that `update` has not read."""
        # No reader or writer uses the position.
        return os.lseek(self._descriptor, 0, os.SEEK_END) != self._end

    def update(self, apply: Callable[..., None]) -> None:
        """Call `apply(*entry)` for each new line."""
        with self._lock:
            size = os.lseek(self._descriptor, 0, os.SEEK_END) - self._end
            lines = os.pread(self._descriptor, size, self._end)
            # Another process may be within the write of the last line.
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


# Mode, buffering, encoding, errors, newline.
How = tuple[str, int, str | None, str | None, str | None]


def noted_file(name: Any, target: str, how: How, on_close: Callable[[], None] | None = None) -> Any:
    """Open the file `target` as `open(name, *how)` does.

    With `on_close`, which is called after the close, it is only written, from its beginning.
    """
    mode, buffering, encoding, errors, newline = how

    def opener(_: str, flags: int) -> int:
        return int(REAL.descriptor(target, flags, 0o666))

    if on_close is None:
        return REAL.open(name, *how, opener=opener)
    raw = NotedFile(os.fspath(name), re.sub("[bt]", "", mode), opener=opener)
    raw.on_close = on_close
    raw.process = os.getpid()
    if buffering == 0:
        return raw
    size = buffering
    if buffering <= 1:
        size = max(io.DEFAULT_BUFFER_SIZE, os.fstat(raw.fileno()).st_blksize)
    buffer = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def open_function(
    open_path: Callable[[Any, How], Any], is_active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return the replacement of `open`.

    While it is active, it calls `open_path` with a path and valid arguments.
    """

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
        if mode not in READING:  # raise an error of the arguments
            # The null device exists, so not `x`.
            REAL.open(os.devnull, mode.replace("x", "w"), *how[1:]).close()
        return open_path(file, how)

    return open


def copy_file(source: str, target: str, most: float) -> bool:
    """Copy a file with its mode and times.

    Of a file of more than `most` bytes only the size is copied, without blocks.

    Returns:
        Whether the content was copied.
    """
    state = REAL.stat(source)
    with suppress(FileNotFoundError):
        REAL.unlink(target)
    with REAL.open(source, "rb") as old, REAL.open(target, "wb") as new:
        if state.st_size <= most:
            shutil.copyfileobj(old, new, 1 << 20)
        else:
            new.truncate(state.st_size)
    # After the content: the mode can forbid writes.
    REAL.chmod(target, stat.S_IMODE(state.st_mode))
    REAL.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
    return bool(state.st_size <= most)


def begins_again(mode: str) -> bool:
    """Whether a file in this mode is written from its beginning, and its memory is not mapped."""
    return not set("ar+") & set(mode)


def key_of(path: str) -> str:
    """Return the path without numbers and names of `tempfile`, which can differ between ranks."""
    return re.sub("tmp[a-z0-9_]{8}|[0-9]+", "#", path)


def listing_of(folder: str) -> str:
    """Return the name of the listings of a folder by the current line of the script."""
    return f"{folder} {line_of_script()}"


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
        libraries = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))
        self._system = (*_SYSTEM, *(f"{path}/" for path in libraries))

    def covers(self, path: str) -> bool:
        """Whether a path without links is used by each rank for itself."""
        return path.startswith(self._real) or "/__pycache__" in path or self._is_temporary(path)

    def _is_temporary(self, path: str) -> bool:
        if self.local.depth > 0:
            return True
        folder = self._temporary_folder
        name = path[len(folder) :].partition("/")[0]
        return path.startswith(folder) and name in self._temporary

    def passing(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function whose own files are exempt in this thread."""
        self.local.depth += 1
        try:
            return function(*arguments, **options)
        finally:
            self.local.depth -= 1

    def is_foreign(self, path: str) -> bool:
        """Whether rank 0 prepares nothing at this path, or an import of a library asks for it."""
        # "/<" begins names of code without a file, as <string>, which tracebacks look up.
        is_of_system = path.startswith(self._system) or "/<" in path or "-packages/" in path
        if is_of_system or self._is_temporary(path):
            return True
        frame = sys._getframe(1)
        while frame is not None and is_library_file(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def mkstemp(self, folder: Any, *arguments: Any) -> Any:
        return self._made(folder, REAL.mkstemp, folder, *arguments)

    def mkdtemp(self, suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        return self._made(dir or self._temporary_folder, REAL.mkdtemp, suffix, prefix, dir)

    def _made(self, folder: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        place = f"{os.path.realpath(os.fsdecode(folder))}/"
        if place != self._temporary_folder and not self.covers(place):
            return function(*arguments)
        made = self.passing(function, *arguments)
        path = made
        if isinstance(made, tuple):  # of `mkstemp`, with a descriptor
            path = made[1]
        if place == self._temporary_folder:
            self._temporary.add(os.path.basename(os.fsdecode(path)))
        return made


class Entry(os.PathLike[Any]):
    """Entry of a folder that this rank or rank 0 has changed; see `os.DirEntry`."""

    def __init__(self, stat: Callable[..., Any], folder: Any, name: str) -> None:
        self._stat = stat
        self.name = os.fsencode(name) if isinstance(folder, bytes) else name
        self.path = os.path.join(os.fspath(folder), self.name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        result: os.stat_result = self._stat(self.path, follow_symlinks=follow_symlinks)
        return result

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self._mode(False))

    def is_junction(self) -> bool:
        return False

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0


class Entries(Iterator[Any]):
    """Entries of a folder; see `os.scandir`."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())
