"""Count of the times that the host would wait for a GPU, on CPU tensors."""

import sys
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions that return values of a tensor to the host, or whose result has a size that depends on values.
_READS = {"tolist", "item", "__float__", "__bool__", "__int__", "__index__", "__contains__", "cpu", "numpy"}
_READS |= {"nonzero", "unique", "masked_select", "equal", "allclose", "is_nonzero", "bincount"}
# Functions whose tensors are on the host in any case.
_ON_HOST = {
    "distributed/world.py": ("_bytes",),
}


class Waits(TorchFunctionMode):
    """Counts calls that wait for the device if the tensors are on a GPU.

    Attributes:
        calls: number of calls by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            caller = sys._getframe(1).f_code
            if not any(
                caller.co_filename.endswith(file) and caller.co_name in names for file, names in _ON_HOST.items()
            ):
                self.calls[name] += 1
        elif name == "__setitem__" and not isinstance(args[2], torch.Tensor):
            self.calls["write of a number"] += 1  # torch copies the number from the host
        elif name == "__getitem__" and any(_is_mask(index) for index in _indices(args[1])):
            self.calls["index by a mask"] += 1
        elif name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            self.calls["tensor on a device"] += 1
        return func(*args, **kwargs)


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool
