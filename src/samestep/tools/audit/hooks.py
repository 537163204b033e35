"""Entry point inside audited processes: install the observers after the import of torch.

The `.pth` file of `injection.py` calls `install` at the start of Python, so this module imports
nothing large.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec

from samestep.tools.audit.events import EventWriter

TYPE_CHECKING = False  # not from `typing`, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


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
    sys.meta_path.insert(
        0, _TorchFinder(EventWriter(folder), settings["steps"], settings["without"])
    )


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
                _install_observers(self._writer, self._steps, self._without)

            spec.loader.exec_module = load_and_observe  # type: ignore[method-assign]
        return spec


def _install_observers(writer: EventWriter, steps: int, without: Sequence[str]) -> None:
    """Observe loaders, random draws, optimizers, losses, files and checkpoints of this process; see `Session`."""
    # Here, since these modules import torch.
    from samestep.tools.audit.observers.files import observe_files
    from samestep.tools.audit.observers.functional import observe_losses, observe_modules
    from samestep.tools.audit.observers.loading import observe_fetches, observe_loading
    from samestep.tools.audit.observers.session import Session
    from samestep.tools.audit.observers.steps import observe_steps

    session = Session(writer, steps, without)
    observe_loading(session, observe_steps(session))
    observe_fetches(session)
    observe_modules(session)
    observe_losses(session)
    observe_files(session)
