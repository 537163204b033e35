"""Standard streams: the log of a rank, a closed terminal, and writes that never fail."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

# Time that a run waits for a reader that does not read, such as a terminal stopped by Ctrl-S.
STALL_SECONDS = 5.0
# Time that a rank waits for the reader of its standard output, such as the next program of a
# pipeline.
STDOUT_SECONDS = 60.0
# Errors that a later write may not have. After other errors, such as a closed pipe, the descriptor
# is redirected.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_standard_descriptors() -> None:
    """Open the null device for each closed standard descriptor, before files are opened.

    Otherwise a file or a socket would get the number of the descriptor, and with the number its
    output.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def send_output_to(log: Path) -> None:
    """Append the output of this process, such as a rank, to a file."""
    from samestep.distributed.disk_operations import regular_file  # slow for the start of commands

    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=regular_file) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def open_terminals() -> list[int]:
    """Return the descriptors of standard output and standard error that are terminals."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def redirect_to_null(descriptors: list[int]) -> None:
    """Redirect descriptors of a closed terminal, so that printing cannot fail the run."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def protect_output(*, stdout_seconds: float | None, stderr_seconds: float = STALL_SECONDS) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams with writes that do not fail.

    Output is dropped after an error, or if the reader does not read for a number of seconds; None
    waits without limit. Characters that the encoding lacks are escaped.
    """
    sys.stdout = _protected(sys.stdout, 1, stdout_seconds)
    sys.stderr = _protected(sys.stderr, 2, stderr_seconds)


def wait_for_reader() -> None:
    """Write to `sys.stderr` without a time limit from now on, for the report after the run."""
    if isinstance(output := _buffer(sys.stderr), _Output):
        output.stall_seconds = None


def lost_output() -> OSError | None:
    """Return the error by which standard output was lost; None for a closed pipe."""
    sys.stdout.flush()
    output = _buffer(sys.stdout)
    if isinstance(output, _Output):
        return output.error
    return None


def report_line(line: str) -> None:
    """Print a line on standard error, which may be closed, or its reader be gone."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """Writer to a descriptor; `error` is the first error other than a closed pipe."""

    def __init__(self, descriptor: int, stall_seconds: float | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.stall_seconds = stall_seconds
        self.error: OSError | None = None
        self._dropped = 0  # bytes since the reader stopped reading

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view and self._is_ready():
                if self._dropped:
                    note = (
                        f"\n[{self._dropped:,} bytes were dropped: the reader of this output had "
                        "stopped]\n"
                    )
                    self._dropped = 0
                    view = memoryview(note.encode() + view)
                # A descriptor that is ready accepts this many bytes without blocking. None: another
                # process that shares the descriptor has made it non-blocking, and was faster.
                view = view[super().write(view[: select.PIPE_BUF]) or 0 :]
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.error = self.error or error
            if error.errno not in _DISK_ERRORS:
                redirect_to_null([self.fileno()])
        else:
            self._dropped += len(view)
        return size

    def _is_ready(self) -> bool:
        # No second wait: the reader has already stopped.
        limit = 0.0 if self._dropped else self.stall_seconds
        return bool(select.select([], [self], [], limit)[1])


def _buffer(stream: TextIO) -> object:
    return getattr(stream, "buffer", None)  # a notebook's stream has none


def _protected(stream: TextIO | None, descriptor: int, stall_seconds: float | None) -> TextIO:
    encoding = "utf-8"
    if stream is not None:  # None: the descriptor was closed when Python started
        encoding = stream.encoding
        with suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        _Output(descriptor, stall_seconds),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
