"""Frozen parameters and norm layers, and parameter groups of the optimizer: weight decay and layer decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from samestep.config import LearningRateConfig, LearningRateRule, OptimizerConfig
from samestep.config.exclusions import require_compatible
from samestep.distributed.devices import is_accelerator
from samestep.errors import InputError, RecipeError
from samestep.torchvision_import import make_torchvision_importable

Group = dict[str, Any]


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[Group]:
    """Return groups of trained parameters with equal learning rate and weight decay, full rate first.

    A group has `lr_scale`, which `apply_layer_decay` applies, and `weight_decay: 0.0` for
    parameters without decay.
    """
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if config.layer_decay is None and config.decay_norms:
        return [{"params": list(trained.values())}]
    layers = dict.fromkeys(trained, 0) if config.layer_decay is None else layer_numbers(model)
    excluded = getattr(
        model, "no_weight_decay", None
    )  # such as the position embeddings of timm's models
    without_decay = set(excluded()) if callable(excluded) else set()
    groups: dict[tuple[int, bool], Group] = {}
    for name, parameter in trained.items():
        decays = config.decay_norms or (parameter.ndim > 1 and name not in without_decay)
        group = groups.setdefault(
            (layers[name], decays), {"params": [], **({} if decays else {"weight_decay": 0.0})}
        )
        if config.layer_decay is not None:
            group["lr_scale"] = config.layer_decay ** (max(layers.values()) - layers[name])
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def apply_layer_decay(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> tuple[str, ...]:
    """Multiply each group's learning rate by its `lr_scale`, and return a note for the user."""
    scales = [group["lr_scale"] for group in optimizer.param_groups if "lr_scale" in group]
    if not scales:
        return ()
    rate = optimizer.param_groups[0].get("lr")
    options = {"optimizer.layer_decay": config.layer_decay, "learning rate": rate}
    require_compatible(options, RecipeError)
    for group in optimizer.param_groups:
        group["lr"] *= group["lr_scale"]
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    return (
        f"layer decay {config.layer_decay}: {len(rates)} learning rates from {rates[0]:.3g} to {rates[-1]:.3g}",
    )


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter, from 0 at the input.

    Models of timm define their own numbers. In other models, the members of the outermost lists of
    modules of one class (`ModuleList` or `Sequential`) are the blocks. Parameters before the first
    block are layer 0, parameters after the last block are one more layer, and parameters between
    two blocks belong to the earlier block.
    """
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        make_torchvision_importable()
        from timm.models import group_parameters

        numbers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return numbers
    blocks = list(_blocks(model, ""))
    require_compatible({"optimizer.layer_decay": "set", "blocks": blocks}, RecipeError)
    numbers = {}
    current = 0
    for name, _ in model.named_parameters():
        inside = next(
            (number for number, block in enumerate(blocks, start=1) if name.startswith(block)), None
        )
        current = current if inside is None else inside
        is_after = inside is None and current == len(blocks)
        numbers[name] = len(blocks) + 1 if is_after else current
    return numbers


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the name prefixes of the members of the outermost lists of modules of one class."""
    children = dict(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len(children) > 1 and len({type(child) for child in children.values()}) == 1:
        if any(True for _ in module.parameters()):
            yield from (f"{prefix}{name}." for name in children)
        return
    for name, child in children.items():
        yield from _blocks(child, f"{prefix}{name}.")


def scaled_lr(
    lr: float, batch_size: int, *, rule: LearningRateRule, base_batch_size: int | None = None
) -> float:
    """Return the learning rate for `batch_size`, from the rate for `base_batch_size`.

    Args:
        lr: rate for `base_batch_size`.
        batch_size: samples per step, over all ranks.
        rule: `fixed`: `lr`; `linear`: times `batch_size / base_batch_size` (Goyal et al.,
            "Accurate, large minibatch SGD", 2017); `sqrt`: times the square root of that ratio
            (Krizhevsky, "One weird trick", 2014).
        base_batch_size: required for `linear` and `sqrt`.

    Raises:
        InputError: unknown rule, or a batch size is missing or below 1.
    """
    base = LearningRateConfig(rule=rule, base_batch_size=base_batch_size).base_batch_size
    if batch_size < 1:
        raise InputError(
            f"batch_size is {batch_size}", "batch_size >= 1", "pass the size of the global batch"
        )
    if base is None:
        return lr
    if rule == "linear":
        return lr * batch_size / base
    return lr * math.sqrt(batch_size / base)


def scale_rates(
    optimizer: torch.optim.Optimizer, batch_size: int, config: LearningRateConfig
) -> tuple[str, ...]:
    """Scale the rate of every parameter group, and return one line of text per changed rate.

    Raises:
        InputError: the optimizer has no learning rate.
    """
    if config.rule == "fixed":
        return ()
    lines = []
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise InputError(
                f"learning_rate.rule is {config.rule} but {type(optimizer).__name__} has no learning rate",
                expected="the optimizer's parameter groups have an lr",
                fix="set learning_rate.rule: fixed",
                code="E_OPTIMIZER",
            )
        before = float(group["lr"])
        group["lr"] = scaled_lr(
            before, batch_size, rule=config.rule, base_batch_size=config.base_batch_size
        )
        ratio = f"{batch_size}/{config.base_batch_size}"
        factor = ratio if config.rule == "linear" else f"sqrt({ratio})"
        lines.append(f"learning rate {group['lr']:.6g} = {before:.6g} x {factor} ({config.rule})")
    return tuple(dict.fromkeys(lines))


def apply_schedule(scheduler: LambdaLR) -> None:
    """Set the rates of the next step by the schedule's own functions, instead of those read from a checkpoint."""
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(scheduler.last_epoch)


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
