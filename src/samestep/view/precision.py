"""One floating-point precision for all operations of a call, independent of the conversions in its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_CONVERSIONS: dict[Callable[..., Any], torch.dtype] = {
    **dict.fromkeys(
        (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double),
        torch.float32,
    ),
    **dict.fromkeys((torch.Tensor.cfloat, torch.Tensor.cdouble), torch.complex64),  # type: ignore[attr-defined]
}
# Functions that take the precision of an array of NumPy.
_FROM_ARRAYS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
# The dtype of a view is the interpretation of its bits.
_UNCHANGED = frozenset({torch.Tensor.view, torch.frombuffer})


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor without its graph; numbers that are not integers get the precision of `dtype`."""
    if tensor.is_complex():
        dtype = _COMPLEX[dtype]
    elif not tensor.is_floating_point():
        dtype = tensor.dtype
    return tensor.detach().to(dtype, copy=True)


class Precision(TorchFunctionMode):
    """Function mode that computes in one precision: conversions to others, also by autocast, have no effect.

    Autocast does not convert tensors of float64. In float32 it is switched off around each
    operation.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device.type
        self._dtypes = {
            **dict.fromkeys(_REAL, dtype),
            **dict.fromkeys(_COMPLEX.values(), _COMPLEX[dtype]),
        }
        self._dtypes[torch.complex32] = _COMPLEX[dtype]

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if function in _CONVERSIONS:
            return arguments[0].to(self._dtypes[_CONVERSIONS[function]])
        if function not in _UNCHANGED:
            arguments = [self._mapped(value) for value in arguments]
            options = {name: self._mapped(value) for name, value in options.items()}
        if self._dtype is torch.float32 and torch.is_autocast_enabled(self._device):
            with torch.autocast(self._device, enabled=False):
                return function(*arguments, **options)
        result = function(*arguments, **options)
        if function in _FROM_ARRAYS and result.dtype in self._dtypes:
            return result.to(self._dtypes[result.dtype])
        return result

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtypes.get(value, value)
        return value
