"""End of the process of a rank around an unchanged script: children, threads, and files.

The end is as in plain Python, although the process of a rank ends without functions of `atexit`,
and loses open files. Private: `weakref.finalize._registry`.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from samestep.distributed.standard_streams import report_line
from samestep.errors import EXIT_DONE, EXIT_FAILED
from samestep.launcher.worker import exit_process
from samestep.script.patches import replaced

_REPORT_SECONDS = 3.0  # of a wait for a thread
_Kind = TypeVar("_Kind")
_FILE: Any = io.IOBase.__base__  # a check of many classes against the abstract class takes long


# --- children ---


@contextmanager
def plain_start_method() -> Iterator[None]:
    """Let `multiprocessing` start processes as in plain Python.

    The start method of a rank would use the server of the ranks.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)  # the default of the system
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def children_ended() -> Iterator[None]:
    """End forked children at the end of the block: they must not take part in the rank's end.

    A child has the exit code of the script, which it has run to its end.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            error = sys.exc_info()[1]
            code = error.code if isinstance(error, SystemExit) else error
            if code is not None and not isinstance(code, int):
                traceback.print_exception(error)
                code = EXIT_FAILED
            exit_process(code or EXIT_DONE)


# --- end ---


@contextmanager
def exit_functions_called() -> Iterator[None]:
    """Call the functions that are registered inside the block at its end, the last one first."""
    # Each function alone, and with its arguments.
    functions: list[tuple[Callable[..., Any], Callable[[], Any]]] = []
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
            # One by one: an exit function can register another one.
            while functions:
                _call(functions.pop()[1])
            # The newest first, as `weakref` calls them.
            for finalizer in reversed(list(registry)):
                if finalizer.atexit and finalizer not in finalizers_before:
                    _call(finalizer)


def _call(function: Callable[[], Any]) -> None:
    try:
        function()
    except Exception:  # boundary: as in plain Python, an error changes neither others nor the code
        traceback.print_exc()


@contextmanager
def threads_joined() -> Iterator[None]:
    """Wait at the end of the block for threads that were started inside.

    After an error there is no wait.
    """
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
    """Close the files that are opened in the block and never closed, as the end of Python does."""
    before = weakref.WeakSet(_open_files())
    try:
        yield
    finally:
        files = [file for file in _open_files() if file not in before]
        # All before the first close: a layer above a closed file cannot write any more.
        for file in files:
            _call(file.flush)
        for file in sorted(files, key=_layer):
            _call(file.close)


def _open_files() -> list[io.IOBase]:
    # Without the standard streams, which the rank still needs.
    return [file for file in _all_of(_FILE) if not file.closed and _descriptor(file) > 2]


def _all_of(kind: type[_Kind]) -> list[_Kind]:
    # Not `isinstance`, which runs code of objects that imitate another class.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _layer(file: io.IOBase) -> int:
    """Return a number that is smaller than that of the file to which a file writes."""
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.RawIOBase):
        return 3
    if type(file).__module__ == "_io":
        return 2
    return 1  # compressed files are written in Python


def _descriptor(file: io.IOBase) -> int:
    try:
        return file.fileno()
    except (OSError, ValueError, AttributeError):  # in memory, or detached
        return -1
