"""Optimizers of recipes: short names, parameter groups, learning rates, and fused updates.

A learning rate is a function of the global batch size and the step, never of the number of
devices.

Decisions: docs/decisions/recipes.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from samestep.config import LearningRateConfig, OptimizerConfig, ScheduleConfig
from samestep.config.exclusions import require_compatible
from samestep.distributed.devices import is_accelerator
from samestep.errors import InputError, RecipeError
from samestep.zoo.options import call, returned

# Short names and import paths.
OPTIMIZERS = {"sgd": "torch.optim:SGD", "adam": "torch.optim:Adam", "adamw": "torch.optim:AdamW"}
Group = dict[str, Any]
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# Options that select another computation than the fused one, or need one.
_OTHER_WAYS = frozenset({"fused", "foreach", "capturable", "differentiable", "dampening"})


def build_optimizer(
    config: OptimizerConfig, kind: Callable[..., Any], model: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer of a model; `kind` is the class that the recipe names."""
    groups = parameter_groups(model, config)
    options = default_options(kind, config.options, groups)
    optimizer = call(kind, options, groups, where="optimizer.options")
    return returned(optimizer, torch.optim.Optimizer, f"optimizer {config.name!r}")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[Group]:
    """Return groups of trained parameters with equal rate and weight decay, full rate first.

    A group has `lr_scale`, which `apply_layer_decay` applies, and `weight_decay: 0.0` for
    parameters without decay.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if config.layer_decay is None and config.decay_norms:
        return [{"params": list(trained.values())}]
    layers = dict.fromkeys(trained, 0)
    if config.layer_decay is not None:
        layers = layer_numbers(model)
    # Such as the position embeddings of timm's models.
    excluded = getattr(model, "no_weight_decay", set)
    without_decay = set(excluded()) if callable(excluded) else set()
    groups: dict[tuple[int, bool], Group] = {}
    for name, parameter in trained.items():
        decays = config.decay_norms or (parameter.ndim > 1 and name not in without_decay)
        group = groups.setdefault((layers[name], decays), {"params": []})
        if not decays:
            group["weight_decay"] = 0.0
        if config.layer_decay is not None:
            # From the last layer of the model, frozen or not: freezing changes no other rate.
            group["lr_scale"] = config.layer_decay ** (max(layers.values()) - layers[name])
        group["params"].append(parameter)
    # The rate of the first group is the one that events show.
    return [groups[key] for key in sorted(groups, reverse=True)]


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter of a model of timm, from 0 at the input."""
    matcher: Any = getattr(model, "group_matcher", None)
    require_compatible({"optimizer.layer_decay": "set", "group_matcher": matcher}, RecipeError)
    from timm.models import group_parameters

    numbers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    return numbers


def scale_rates(
    optimizer: torch.optim.Optimizer, batch_size: int, config: LearningRateConfig
) -> list[str]:
    """Scale the rate of every parameter group, and return one line of text per changed rate.

    The rule `linear` multiplies by `batch_size / base_batch_size` (Goyal et al., "Accurate, large
    minibatch SGD", 2017), and `sqrt` by the square root of that ratio (Krizhevsky, "One weird
    trick", 2014).

    Raises:
        InputError: the optimizer has no learning rate.
    """
    base = config.base_batch_size
    if base is None:
        return []
    lines = []
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"learning_rate.rule is {config.rule} but {type(optimizer).__name__} has no "
                "learning rate",
                expected="the optimizer's parameter groups have an lr",
                fix="set learning_rate.rule: fixed",
                code="E_OPTIMIZER",
            )
        before = float(group["lr"])
        group["lr"] = before * math.sqrt(batch_size / base)
        factor = f"sqrt({batch_size}/{base})"
        if config.rule == "linear":
            group["lr"] = before * batch_size / base
            factor = f"{batch_size}/{base}"
        lines.append(f"learning rate {group['lr']:.6g} = {before:.6g} x {factor} ({config.rule})")
    return list(dict.fromkeys(lines))  # once each: most groups have the same rate


def apply_layer_decay(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> list[str]:
    """Multiply each group's learning rate by its `lr_scale`, and return a note for the user."""
    groups = [group for group in optimizer.param_groups if "lr_scale" in group]
    if not groups:
        return []
    decay = config.layer_decay
    options = {"optimizer.layer_decay": decay, "learning rate": groups[0].get("lr")}
    require_compatible(options, RecipeError)
    for group in groups:
        group["lr"] *= group["lr_scale"]
    rates = sorted({float(group["lr"]) for group in groups})
    count = len(rates)
    return [f"layer decay {decay}: {count} learning rates from {rates[0]:.3g} to {rates[-1]:.3g}"]


def schedule_factor(
    schedule: ScheduleConfig, steps_per_epoch: int, epochs: int
) -> Callable[[int], float]:
    """Return a function from a step (from 0) to the factor of the learning rate.

    `cosine` is the schedule of Loshchilov & Hutter, "SGDR" (2017), without restarts. `cosine` and
    `linear` start after the warm-up and reach `final` at the last step. The decreases of `step`
    count from the first step of the run, so that the warm-up does not move them (Goyal et al.,
    "Accurate, large minibatch SGD", 2017).
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    # The last step has the final rate, so there is one interval less than steps.
    decay = max(1, steps_per_epoch * epochs - 1 - warmup)
    period = max(1, round(schedule.step_epochs * steps_per_epoch))

    def factor(step: int) -> float:
        if step < warmup:
            # Not from 0: the first step would change nothing.
            return (step + 1) / warmup
        if schedule.name == "constant":
            return 1.0
        if schedule.name == "step":
            return schedule.gamma ** (step // period)
        # After the last step, the scheduler computes the rate of one step more.
        progress = min(1.0, (step - warmup) / decay)
        remaining = 1 - progress
        if schedule.name == "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
        return schedule.final + (1 - schedule.final) * remaining

    return factor


def apply_schedule(scheduler: LambdaLR) -> None:
    """Set the rates of the next step by the schedule, instead of those of a checkpoint."""
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)


# --- fused optimizers of torch: one kernel per update, which a device can leave out ---


def default_options(
    optimizer: Callable[..., Any], options: Mapping[str, Any], groups: Sequence[Group]
) -> dict[str, Any]:
    """Return the options of an optimizer, with `fused=True` for parameters on accelerators.

    Not on a CPU, where its results have other bits than those of earlier runs.
    """
    can_be_fused = all(
        is_accelerator(one.device) and one.is_floating_point()
        for group in groups
        for one in group["params"]
    )
    if can_be_fused and optimizer in _FUSED and _OTHER_WAYS.isdisjoint(options):
        return {**options, "fused": True}
    return dict(options)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the device can leave an update out; prepare the optimizer for that."""
    groups = optimizer.param_groups
    # Not subclasses: a step of their own may not know the flag.
    if type(optimizer) not in _FUSED or not all(group["fused"] for group in groups):
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    if any(group["dampening"] for group in groups):
        return False
    # torch's fused SGD has two faults at the first step (2.11 and 2.13): if it is left out, the
    # momentum is memory that was never written; and it fails if a parameter has its first gradient
    # later than others. A momentum of zeros has the bits of a first step without one.
    for parameter in [one for group in groups if group["momentum"] for one in group["params"]]:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        optimizer.state[parameter]["momentum_buffer"] = zeros
    return True


def step_if(optimizer: torch.optim.Optimizer, is_finite: torch.Tensor) -> None:
    """Update the parameters if a scalar on the device is true, without waiting for the device.

    Args:
        optimizer: one for which `decides_on_device` holds.
        is_finite: the scalar.
    """
    fused: Any = optimizer
    fused.found_inf = is_finite.logical_not().float()  # the attribute that GradScaler sets
    try:
        optimizer.step()
    finally:
        del fused.found_inf
