"""A function called in a copy of this process, where it cannot change the objects of this one."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch

from samestep.distributed.stop_request import die_with_parent
from samestep.launcher.pickling import pack, unpack

Result = TypeVar("Result")


def called_in_copy(function: Callable[[], Result], seconds: float) -> Result | None:
    """Return what a function returns in a forked process; None if it fails there.

    The function may read files and call code of the script. It must not use a GPU or other ranks.
    Output is dropped, and positions in open files are restored.

    Args:
        function: the result is pickled.
        seconds: time after which the process is killed: a lock of another thread can be held in it
            forever.
    """
    if not hasattr(os, "fork"):
        return None
    # Not `multiprocessing`: workers of loaders are daemons, which may not start its processes.
    receiver, sender = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent, whose locks are the reason of the time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _call(function, sender, parent)
    os.close(sender)
    try:
        content = _received(receiver, time.monotonic() + seconds)
    finally:
        os.close(receiver)
        os.kill(process, signal.SIGKILL)  # a process that has ended keeps its number until the wait
        os.waitpid(process, 0)
    if not content:
        return None
    result: Result = unpack(content)
    return result


def _call(function: Callable[[], object], sender: int, parent: int) -> NoReturn:
    """Call the function in the copy, send its result, and end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the copy
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler of a rank only notes a request
        die_with_parent(parent)
        gc.disable()  # no destructor of an object of the parent
        logging.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        # Descriptors too: code in C does not write by `sys.stdout`.
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the end
        torch.set_num_threads(1)  # the threads of the parent's OpenMP are not in the copy
        positions = _positions()
        try:
            content = pack(function())
        finally:
            for descriptor, position in positions.items():
                with suppress(OSError):  # closed since
                    os.lseek(descriptor, position, os.SEEK_SET)
        with open(sender, "wb") as file:
            file.write(content)
        code = 0
    finally:
        os._exit(code)  # without the exit functions of the parent


def _positions() -> dict[int, int]:
    """Return the positions of open files, which a copy shares with its parent."""
    positions = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # a pipe, a socket, or the folder that was listed
            positions[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
    return positions


def _received(receiver: int, deadline: float) -> bytes:
    """Return what the copy sends; nothing if it sends nothing complete until the deadline."""
    content = b""
    while select.select([receiver], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(receiver, 2**16)
        if not part:
            return content
        content += part
    return b""
