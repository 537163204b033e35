"""Observer of files that a process truncates and writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from samestep.tools.audit.events import user_line
from samestep.tools.audit.observers.session import Session

# Files of libraries that write them by several processes on purpose: locks and caches.
_SUFFIXES = (".lock", ".pyc", ".pid")
_FOLDERS = ("/dev/", "/proc/", "/sys/")
_CACHES = (".cache", "__pycache__", "torchinductor_", "triton", "site-packages")


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
        is_locked = os.path.exists(f"{name}.lock")  # one rank at a time, as the metrics of `evaluate`
        if is_locked or any(part.startswith(_CACHES) for part in parts):
            return
        line = user_line()
        if line:
            self._paths.add(name)
            self._session.emit("file", path=name, line=line)


def observe_files(session: Session) -> None:
    """Observe files that are opened for writing, and checkpoints, which torch writes without Python's `open`."""
    observer = FileObserver(session)
    opened, written = session.guarded(observer.opened), session.guarded(observer.written)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and len(arguments) == 3 and isinstance(arguments[2], int):
            opened(arguments[0], arguments[2])

    sys.addaudithook(hook)
    save = torch.save

    def observed_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            written(f)
        return save(obj, f, *args, **kwargs)

    patched: Any = torch
    patched.save = observed_save
