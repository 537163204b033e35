"""Disk errors and kills at a chosen system call, and a sequence of saves to test them on."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.store import CheckpointFolder

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir")
REMOVING = ("unlink", "rmdir")

# Step, contents, is_best. With keep=1: a first save, a best one, a replacement of the same step, one that prunes an
# older checkpoint, equal contents again, and a new best one.
SAVES: list[tuple[int, dict[str, bytes], bool]] = [
    (1, {"model": b"1" * 50, "state": b"{}"}, False),
    (2, {"model": b"2" * 50, "state": b"{}"}, True),
    (2, {"model": b"3" * 50, "state": b"after its evaluation"}, False),
    (3, {"model": b"4" * 50, "state": b"{}"}, False),
    (3, {"model": b"4" * 50, "state": b"{}"}, False),
    (4, {"model": b"5" * 50, "state": b"{}", "empty": b""}, True),
]
Action = Callable[[str, Callable[..., Any], tuple[Any, ...]], None]


@contextmanager
def intercepting(patch: pytest.MonkeyPatch, first: int, last: float, action: Action) -> Iterator[None]:
    """Call `action(name, call, arguments)` before the calls from number `first` to `last`, counted from 0."""
    count = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            # Folders are opened only to list or sync; an error there is covered by the next call.
            if name != "open" or arguments[1] & os.O_CREAT:
                number, count = count, count + 1
                if first <= number <= last:
                    action(name, call, arguments)
            return call(*arguments, **named)

        return counted

    with patch.context() as inner:
        for name in CALLS:
            inner.setattr(os, name, wrapped(name, getattr(os, name)))
        yield


def kill(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Kill this process, in the middle of a write."""
    if name == "write":
        descriptor, data = arguments
        call(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with(number: int, *, removing: bool) -> Action:
    """Raise the error `number`, on removals only if `removing`."""

    def fail(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if removing or name not in REMOVING:
            raise OSError(number, os.strerror(number))

    return fail


def run_saves(folder: CheckpointFolder, done: Callable[[int], None] = lambda saves: None, begin: int = 0) -> None:
    """Run the saves from number `begin`; call `done` with the number of completed saves."""
    for number, (step, files, is_best) in enumerate(SAVES[begin:], begin + 1):
        folder.write(step, files, is_best=is_best)
        done(number)


def content(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint without the manifest."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}


def names(folder: CheckpointFolder) -> list[str]:
    """Return all names in a folder of checkpoints."""
    return sorted(path.name for path in folder.path.iterdir())


def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Mount a separate file system, if permitted."""
    place.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root may mount")
    done = subprocess.run([mount, *arguments, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)  # also after a test that left a process there
