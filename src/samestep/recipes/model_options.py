"""Options of a model that change its memory or its speed: TF32, memory format, activation checkpointing, compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from samestep.config import RecipeStep
from samestep.config.validation import match_patterns
from samestep.distributed.devices import set_tf32


def transform_model(model: torch.nn.Module, config: RecipeStep, device: torch.device) -> None:
    """Set the options of a model in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    set_tf32(device, allowed=config.tf32)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in _checkpointed_modules(model, config.recompute):
        module.forward = partial(_checkpointed_forward, module.forward)
    if config.compile:
        # Dropout draws the same numbers as without compilation.
        torch._inductor.config.fallback_random = True
        # torch leaves frames of its own modules to the interpreter, so all of an `nn.Sequential`.
        is_of_torch = type(model).__module__.partition(".")[0] == "torch"
        with torch._dynamo.config.patch(wrap_top_frame=is_of_torch):
            model.compile(dynamic=False)


def _checkpointed_forward(forward: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    count = len(arguments)
    names = tuple(named)

    def compute(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # By position: torch restores the generators of the devices of these tensors, and has options of
    # its own by name.
    return checkpoint(compute, *arguments, *named.values(), use_reentrant=False)


def _checkpointed_modules(
    model: torch.nn.Module, patterns: tuple[str, ...]
) -> list[torch.nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    names = match_patterns(
        modules, patterns, key="step.recompute", kind="module", example="blocks.*"
    )
    # The outermost modules only: their children are recomputed with them.
    return [
        modules[name] for name in names if not any(name.startswith(f"{other}.") for other in names)
    ]


def uses_batch_statistics(model: torch.nn.Module) -> bool:
    """Return whether a norm layer of the model uses statistics of the batch in its present mode."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )
