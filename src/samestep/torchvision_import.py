"""Import of torchvision next to a CPU-only torch.

The torchvision of the public package index is built for CUDA. With a CPU build of torch its compiled operators do not
load, and its import fails while it registers shapes for two of them. Declaring these two is enough for models,
transforms and datasets; the operators themselves (nms, image codecs) stay absent.
"""

from __future__ import annotations

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
    if _libraries or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)  # the declarations end with the object
