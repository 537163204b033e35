"""Entry point inside audited processes: events, and observers after the import of torch.

The `.pth` file of `audit.py` calls `install` at the start of Python. So this module imports only
modules that Python has imported by then, or small ones.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from importlib.util import find_spec

TYPE_CHECKING = False  # not from `typing`, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}{os.sep}"
_LIBRARIES = (_PACKAGE, f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_SITE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_is_user: dict[str, bool] = {}  # by file


class EventWriter:
    """Writer of the events of this process; a forked process opens its own file in the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = 0
        self._file = -1
        self.world: tuple[str, int, int] | None = None  # identifier, rank, number of ranks

    def write(self, kind: str, **values: Any) -> None:
        """Append one event."""
        if os.getpid() != self._pid:
            self._open()
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"))
        os.write(self._file, f"{line}\n".encode())

    def set_world(self, identifier: str, rank: int, size: int) -> None:
        """Assign the following events to a rank of a world."""
        self.world = (identifier, rank, size)
        self.write("world", world=self.world)

    def _open(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # the file of the process from which this one was forked
        self._pid = os.getpid()
        name = f"{time.time_ns()}-{self._pid}.jsonl"
        flags = os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
        self._file = os.open(os.path.join(self._folder, name), flags, 0o600)
        self.write("process", pid=self._pid, world=self.world, program=sys.argv[0])


def user_line() -> str:
    """Return the innermost line outside of installed packages, as `train.py:40`, or no text."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _is_user:
            is_library = file.startswith(_LIBRARIES) or any(part in file for part in _SITE)
            _is_user[file] = not is_library and os.path.isfile(file)
        if _is_user[file]:
            return f"{file.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def install(folder: str) -> None:
    """Observe this process and its children, unless the audit has ended and removed its folder."""
    # Python can read a `.pth` file twice, as where lib64 is a link to lib.
    if "torch" in sys.modules or any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        return
    try:
        with open(os.path.join(folder, "settings.json"), encoding="utf-8") as file:
            settings = json.load(file)
    except FileNotFoundError:
        return
    writer = EventWriter(folder)
    sys.meta_path.insert(0, _TorchFinder(writer, settings["steps"], settings["without"]))


class _TorchFinder:
    """Finder that adds the observers to the import of torch, and then removes itself.

    Libraries look for the module without an import, too: `importlib.util.find_spec("torch")`.
    """

    def __init__(self, writer: EventWriter, steps: int, without: Sequence[str]) -> None:
        self._writer = writer
        self._steps = steps
        self._without = without
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_observe(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                load(module)
                # Here, since these modules import torch.
                from samestep.tools.audit.functions import observe_files, observe_functions
                from samestep.tools.audit.loaders import observe_loaders
                from samestep.tools.audit.session import Session
                from samestep.tools.audit.steps import observe_steps

                session = Session(self._writer, self._steps, self._without)
                observe_loaders(session, before_pass=observe_steps(session))
                observe_functions(session)
                observe_files(session)

            spec.loader.exec_module = load_and_observe  # type: ignore[method-assign]
        return spec
