"""Frozen parameters and norm layers, and parameter groups of the optimizer: weight decay and layer decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.config import OptimizerConfig
from samestep.config.validation import match_patterns
from samestep.errors import RecipeError
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
    if "lr" not in optimizer.param_groups[0]:
        raise RecipeError(
            f"optimizer.layer_decay is {config.layer_decay} and {config.name} has no learning rate",
            expected="an optimizer with an lr in each parameter group",
            fix="--set optimizer.layer_decay=null",
            code="E_INCOMPATIBLE",
        )
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
    if not blocks:
        raise RecipeError(
            f"optimizer.layer_decay is set and {type(model).__name__} has no list of similar blocks",
            expected="a model of timm, or a model with a ModuleList or Sequential of modules of one class",
            fix="--set optimizer.layer_decay=null",
            code="E_INCOMPATIBLE",
        )
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


def freeze(
    model: torch.nn.Module, patterns: Sequence[str], exceptions: Sequence[str] = ()
) -> list[str]:
    """Disable gradients of the parameters that match a pattern and no exception, and return their names.

    Without patterns, all parameters but the exceptions are frozen.
    """
    parameters = dict(model.named_parameters())
    match = partial(match_patterns, list(parameters), kind="parameter")
    trained = match(exceptions, key="model.freeze_except", example="head.*")
    frozen = match(patterns or ["*"], key="model.freeze", example="layer1.*")
    frozen = [name for name in frozen if name not in trained]
    if len(frozen) == len(parameters):
        raise RecipeError(
            "model.freeze matches every parameter",
            expected="at least one trained parameter",
            fix="remove patterns of model.freeze, or name the trained parameters in model.freeze_except",
            code="E_PATTERN",
        )
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen


def set_training_mode(model: nn.Module) -> None:
    """Set training mode, and evaluation mode for norm layers with frozen parameters only.

    Such layers belong to a frozen pretrained part, and so do their running statistics.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if (
            isinstance(module, _NormBase)
            and parameters
            and not any(p.requires_grad for p in parameters)
        ):
            module.eval()
