"""Transforms of a model: TF32, memory format, activation checkpointing and compilation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from samestep.config import StepConfig
from samestep.config.validation import match_patterns
from samestep.distributed.devices import set_tf32


def transform_model(model: torch.nn.Module, config: StepConfig, device: torch.device) -> None:
    """Set TF32, memory format, activation checkpointing and compilation, in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    set_tf32(device, allowed=config.tf32)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in _checkpointed_modules(model, config.recompute):
        module.forward = partial(_checkpointed_forward, module.forward)
    if config.compile:
        # Dropout draws the same numbers as without compilation. Kernels are compiled for one size each: the sizes seen
        # earlier on a rank must not select the kernel.
        torch._inductor.config.fallback_random = True
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model.compile(dynamic=False)


def _checkpointed_forward(forward: Any, *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


def _checkpointed_modules(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[torch.nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    names = match_patterns(modules, patterns, key="step.recompute", kind="module", example="blocks.*")
    # The outermost modules only: their children are recomputed with them.
    return [modules[name] for name in names if not any(name.startswith(f"{other}.") for other in names)]
