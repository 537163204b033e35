"""Calls of a model with the inputs of a batch, and the precision of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from samestep.config import Precision

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context of a precision."""
    if (dtype := _AUTOCAST[precision]) is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def call_model(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module`; a mapping or a tuple of inputs is unpacked into arguments."""
    positional, named = as_arguments(inputs)
    return module(*positional, **named)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and named arguments; packed sequences are one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    is_unpacked = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
    if is_unpacked:
        return (tuple(inputs), {})
    return ((inputs,), {})
