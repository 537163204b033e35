"""End of a script as in plain Python: the process of a rank ends without functions of `atexit`, and loses open files.

Private: `weakref.finalize._registry`.
"""

from __future__ import annotations

import atexit
import gc
import io
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from samestep.distributed.streams import report_line
from samestep.script.replaced import replaced

_REPORT_SECONDS = 3.0  # of a wait for a thread
_Kind = TypeVar("_Kind")
_FILE: Any = io.IOBase.__base__  # a check of many classes against the abstract class takes long


@contextmanager
def exit_functions_called() -> Iterator[None]:
    """Call the functions that are registered inside the block at its end, the last one first, as plain Python does."""
    functions: list[
        tuple[Callable[..., Any], Callable[[], Any]]
    ] = []  # each alone, and with its arguments
    unregister_before = atexit.unregister
    registry: dict[weakref.finalize[Any, Any], Any] = vars(weakref.finalize)["_registry"]
    finalizers_before = set(registry)

    def register(
        function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Callable[..., Any]:
        functions.append((function, partial(function, *arguments, **options)))
        return function

    def unregister(function: Callable[..., Any], /) -> None:
        functions[:] = [entry for entry in functions if entry[0] != function]
        unregister_before(function)

    with replaced(atexit, register=register, unregister=unregister):
        try:
            yield
        finally:
            while functions:
                _call(functions.pop()[1])
            for finalizer in reversed(list(registry)):
                if finalizer.atexit and finalizer not in finalizers_before:
                    _call(finalizer)


def _call(function: Callable[[], Any]) -> None:
    try:
        function()
    except (
        Exception
    ):  # boundary: as in plain Python, an error changes neither the others nor the exit code
        traceback.print_exc()


@contextmanager
def threads_joined() -> Iterator[None]:
    """Wait at the end of the block for threads that were started inside. An error is reported without a wait."""
    threads_before = set(threading.enumerate())
    executors_before = weakref.WeakSet(_all_of(Executor))

    def join() -> None:
        for executor in _all_of(Executor):
            if executor not in executors_before:
                executor.shutdown(wait=False)  # otherwise its threads would wait for tasks
        is_reported = False
        while threads := [
            one for one in threading.enumerate() if not one.daemon and one not in threads_before
        ]:
            threads[0].join(_REPORT_SECONDS)
            if threads[0].is_alive() and not is_reported:
                names = ", ".join(thread.name for thread in threads)
                report_line(f"samestep: the script has ended and waits for its threads: {names}")
                is_reported = True

    try:
        yield
    except SystemExit:
        join()
        raise
    join()


@contextmanager
def files_closed() -> Iterator[None]:
    """Close the files that are opened inside the block and never closed: the end of plain Python writes them."""
    before = weakref.WeakSet(_open_files())
    try:
        yield
    finally:
        files = [file for file in _open_files() if file not in before]
        for file in files:
            _call(file.flush)
        for file in sorted(files, key=_layer):
            _call(file.close)


def _open_files() -> list[io.IOBase]:
    """Return open files but those of standard streams."""
    return [file for file in _all_of(_FILE) if not file.closed and _descriptor(file) > 2]


def _all_of(kind: type[_Kind]) -> list[_Kind]:
    """Return all objects of a class that this process has made."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _layer(file: io.IOBase) -> int:
    """Return a number that is smaller than that of the file to which a file writes."""
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.RawIOBase):
        return 3
    return 2 if type(file).__module__ == "_io" else 1  # compressed files are written in Python


def _descriptor(file: io.IOBase) -> int:
    try:
        return file.fileno()
    except (OSError, ValueError, AttributeError):  # in memory, or detached
        return -1
