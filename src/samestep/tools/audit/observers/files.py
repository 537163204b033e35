"""Observers of files that are opened for writing, and of checkpoints: the position in the data at a save, and loads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session

# Files of libraries that write them by several processes on purpose: locks and caches.
_SUFFIXES = (".lock", ".pyc", ".pid")
_FOLDERS = ("/dev/", "/proc/", "/sys/")
_CACHES = (".cache", "__pycache__", "matplotlib", "torchinductor_", "triton", "site-packages")


class FileObserver:
    """Observer of `open` for writing and of `torch.save`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._paths: set[str] = set()
        self._pid = os.getpid()

    def opened(self, path: Any, flags: int) -> None:
        """Write the path of a file that is emptied."""
        writes = flags & (os.O_WRONLY | os.O_RDWR) and flags & os.O_TRUNC and not flags & os.O_EXCL
        if writes and isinstance(path, str | bytes | os.PathLike):
            self.written(path)

    def written(self, path: Any) -> None:
        """Write the path of a file, once."""
        if torch.utils.data.get_worker_info() is not None:
            return
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._paths.clear()
        name = os.path.abspath(os.fsdecode(path))
        parts = Path(name).parts
        if name in self._paths or name.startswith(_FOLDERS) or name.endswith(_SUFFIXES):
            return
        is_locked = os.path.exists(
            f"{name}.lock"
        )  # one rank at a time, as the metrics of `evaluate`
        if is_locked or any(part.startswith(_CACHES) for part in parts):
            return
        line = user_line()
        if line:
            self._paths.add(name)
            self._session.emit("file", path=name, line=line)


def observe_files(session: Session) -> None:
    """Observe files that are opened for writing, saved and loaded checkpoints, and optimizers that load a state.

    Torch writes checkpoints without Python's `open`.
    """
    observer = FileObserver(session)

    def saved(file: Any) -> None:
        positions = session.positions()
        if positions:
            session.emit("saved", key=_key(file), name=os.fsdecode(file), positions=positions)

    def loaded(file: Any) -> None:
        session.emit("loaded", key=_key(file))

    def state_loaded() -> None:
        session.emit("optimizer_loaded", line=user_line())

    opened = session.guarded(observer.opened)
    written = session.guarded(observer.written)
    observed_saved = session.guarded(saved)
    observed_loaded = session.guarded(loaded)
    observed_state = session.guarded(state_loaded)
    patched: Any = torch
    optimizer: Any = Optimizer
    save = torch.save
    load = torch.load
    load_state = optimizer.load_state_dict

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and len(arguments) == 3 and isinstance(arguments[2], int):
            opened(arguments[0], arguments[2])

    def observed_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(f, str | os.PathLike)
        if is_path:
            written(f)
        result = save(obj, f, *args, **kwargs)
        if is_path:
            observed_saved(f)
        return result

    def observed_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(f, *args, **kwargs)
        if isinstance(f, str | os.PathLike):
            observed_loaded(f)
        return result

    def observed_load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        observed_state()
        return load_state(self, *args, **kwargs)

    sys.addaudithook(hook)
    patched.save = observed_save
    patched.load = observed_load
    optimizer.load_state_dict = observed_load_state


def _key(file: Any) -> list[int]:
    """Return the identity of the content of a file, which a rename does not change."""
    status = os.stat(file)
    return [status.st_ino, status.st_mtime_ns]
