"""Entry point inside audited processes: observers after the import of torch.

The `.pth` file of `audit.py` calls `install` at the start of Python. So this module imports only
modules that Python has imported by then, or small ones.
"""

from __future__ import annotations

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
    if os.access(folder, os.W_OK):  # otherwise it belongs to another user, who runs this process
        sys.meta_path.insert(0, _TorchFinder(EventWriter(folder)))


class _TorchFinder:
    """Finder that adds the observers to the import of torch, and then removes itself.

    Libraries look for the module without an import, too: `importlib.util.find_spec("torch")`.
    """

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or self._is_searching:
            return None
        # `find_spec` calls all finders, this one included.
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
                try:
                    self._observe()
                except Exception as error:  # boundary: an observer must not change the run
                    text = f"{type(error).__name__}: {error}"
                    self._writer.write("failure", observer="import of torch", error=text)

            spec.loader.exec_module = load_and_observe  # type: ignore[method-assign]
        return spec

    def _observe(self) -> None:
        # Here, since these modules import torch.
        from samestep.tools.audit.functions import observe_files, observe_functions
        from samestep.tools.audit.loaders import observe_loaders
        from samestep.tools.audit.session import Session
        from samestep.tools.audit.steps import observe_modules, observe_steps

        session = Session(self._writer)
        observe_steps(session)
        observe_loaders(session, before_pass=observe_modules(session).begins)
        observe_functions(session)
        observe_files(session)
