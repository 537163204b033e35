"""Import of torchvision next to a CPU-only torch.

The torchvision of the public package index is built for CUDA. With a CPU build of torch its
compiled operators do not load, and its import fails while it registers shapes for two of them.
Declaring these two is enough for models, transforms and datasets; the operators themselves (nms,
image codecs) stay absent.

In the development environment a `.pth` file calls `install_import_hook` at the start of Python, so
that every program can import torchvision. Therefore functions import modules that the start of
Python does not need.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False  # not from `typing`, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def make_torchvision_importable() -> None:
    """Declare the missing operators; call this before any import of torchvision.

    Does nothing if torchvision's own operators load.
    """
    import torch

    if _libraries or torch.version.cuda is not None or _load_operators():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)  # the declarations end with the object


def _load_operators() -> bool:
    """Load the compiled operators, as torchvision does; return whether they are present."""
    from importlib.util import find_spec
    from pathlib import Path

    import torch

    spec = find_spec("torchvision")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for library in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(library)
            except OSError:
                continue  # built for CUDA
            return True
    return False


def install_import_hook() -> None:
    """Declare the missing operators at the first import of torchvision in this process."""
    sys.meta_path.insert(0, _TorchvisionFinder)


class _TorchvisionFinder:
    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _TorchvisionLoader(spec.loader.name, spec.loader.path)
        return spec


class _TorchvisionLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        make_torchvision_importable()
        super().exec_module(module)
