"""Fused optimizers of torch: one kernel per update, which the device leaves out if a number is not finite.

Decisions: docs/decisions/recipes.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from samestep.distributed.devices import is_accelerator

_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# Options that select another computation, or need one.
_OTHER_WAYS = frozenset({"fused", "foreach", "capturable", "differentiable", "dampening"})


def default_options(
    optimizer: Callable[..., Any], options: Mapping[str, Any], parameters: Iterable[torch.Tensor]
) -> dict[str, Any]:
    """Return the options of an optimizer of a recipe, with `fused=True` for parameters on accelerators.

    Not on a CPU, where its results have other bits than those of earlier runs.
    """
    is_fused = optimizer in _CLASSES and _OTHER_WAYS.isdisjoint(options)
    if is_fused and all(
        is_accelerator(one.device) and one.is_floating_point() for one in parameters
    ):
        return {**options, "fused": True}
    return dict(options)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updates of an optimizer can be left out by the device; prepare the optimizer for that."""
    groups = optimizer.param_groups
    # Not subclasses: a step of their own may not know the flag.
    if type(optimizer) not in _CLASSES or not all(group["fused"] for group in groups):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        if any(group["dampening"] for group in groups):
            return False
        _begin_momentum(optimizer)
    return True


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Give each parameter a momentum of zeros, with which the first step has the bits of one without.

    torch's fused SGD has two faults at the first step (2.11 and 2.13): if it is left out, the
    momentum is memory that was never written; and it fails if a parameter has its first gradient
    later than others.
    """
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter, requires_grad=False
                )


def step_if(optimizer: torch.optim.Optimizer, is_finite: torch.Tensor) -> None:
    """Update the parameters if a scalar on the device is true, without waiting for the device.

    Args:
        optimizer: one for which `decides_on_device` holds.
        is_finite: the scalar.
    """
    fused: Any = optimizer
    fused.found_inf = (
        is_finite.logical_not().float()
    )  # the attribute that torch.amp.GradScaler sets
    try:
        optimizer.step()
    finally:
        del fused.found_inf
