"""A disk that fails, or a kill that comes, at one certain call of the system; and a story of saves to try them on."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.store import CheckpointFolder

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir")
REMOVING = ("unlink", "rmdir")

# Step, content, whether it is the best. With one to keep: a first one, one that is the best, one that takes the place
# of that, one that makes an older one go, the same once more, one that is the best after all.
STORY: list[tuple[int, dict[str, bytes], bool]] = [
    (1, {"model": b"1" * 50, "state": b"{}"}, False),
    (2, {"model": b"2" * 50, "state": b"{}"}, True),
    (2, {"model": b"3" * 50, "state": b"after its evaluation"}, False),
    (3, {"model": b"4" * 50, "state": b"{}"}, False),
    (3, {"model": b"4" * 50, "state": b"{}"}, False),
    (4, {"model": b"5" * 50, "state": b"{}", "empty": b""}, True),
]
Act = Callable[[str, Callable[..., Any], tuple[Any, ...]], None]


@contextmanager
def acting(patch: pytest.MonkeyPatch, first: int, last: float, act: Act) -> Iterator[None]:
    """Call `act(name, call, arguments)` before the calls from number `first` to `last`, counted from 0."""
    count = 0

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            # Folders are opened to be walked through or synced; what such an opening says comes from the next call too.
            if name != "open" or arguments[1] & os.O_CREAT:
                number, count = count, count + 1
                if first <= number <= last:
                    act(name, call, arguments)
            return call(*arguments, **named)

        return counted

    with patch.context() as inner:
        for name in CALLS:
            inner.setattr(os, name, wrapped(name, getattr(os, name)))
        yield


def killing(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """End this process as the kernel does when memory runs out, a write half done."""
    if name == "write":
        descriptor, data = arguments
        call(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int, *, removing: bool) -> Act:
    """Raise the error `number`, where something is removed too or not."""

    def fail(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if removing or name not in REMOVING:
            raise OSError(number, os.strerror(number))

    return fail


def tell(folder: CheckpointFolder, done: Callable[[int], None] = lambda saves: None, begin: int = 0) -> None:
    """The story of saves, from save `begin` on; `done` hears how many of them are done."""
    for number, (step, files, is_best) in enumerate(STORY[begin:], begin + 1):
        folder.write(step, files, is_best=is_best)
        done(number)


def content(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint, but its manifest."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}


def names(folder: CheckpointFolder) -> list[str]:
    """Everything in a folder of checkpoints."""
    return sorted(path.name for path in folder.path.iterdir())
