"""Call of a model with the inputs of a microbatch, and the context of its precision."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.modules import module as _of_all_modules

from samestep.config import Precision

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(getattr(_of_all_modules, f"_global{table}") for table in HOOKS)
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
    """Return inputs as positional and named arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def hooked_part(model: torch.nn.Module) -> str | None:
    """Return the name of a module or a parameter with hooks as a reason; None if there is none."""
    if any(GLOBAL_HOOKS):
        return "all modules have hooks"
    for name, module in model.named_modules():
        if any(getattr(module, table) for table in HOOKS):
            return f"the module {name!r} has hooks"
    parameter = hooked_parameter(model)
    return None if parameter is None else f"the parameter {parameter} has hooks"


def hooked_parameter(model: torch.nn.Module) -> str | None:
    """Return the name of a parameter with hooks for its gradient; None if there is none."""
    named = model.named_parameters()
    return next((name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks), None)
