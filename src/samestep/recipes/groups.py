"""Parameter groups: rates that fall from the last layer to the first, and parameters without weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from samestep.config import OptimizerPart
from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable

Group = dict[str, Any]


def parameter_groups(model: nn.Module, part: OptimizerPart) -> list[Group]:
    """What is trained, in groups of one rate and one weight decay; those of the full rate come first.

    A group has `lr_scale`, a factor that `scale_layers` applies, and `weight_decay: 0.0` where there is to be none.

    Raises:
        RecipeError: rates are to fall from layer to layer, but the model has no layers that can be told apart.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if part.layer_decay is None and part.decay_norms:
        return [{"params": list(trained.values())}]
    layers = dict.fromkeys(trained, 0) if part.layer_decay is None else layer_numbers(model)
    last, spared = max(layers.values()), set() if part.decay_norms else _spared(model)
    groups: dict[tuple[int, bool], Group] = {}
    for name, parameter in trained.items():
        decays = part.decay_norms or (parameter.ndim > 1 and name not in spared)
        group = groups.setdefault((layers[name], decays), {"params": [], **({} if decays else {"weight_decay": 0.0})})
        if part.layer_decay is not None:
            group["lr_scale"] = part.layer_decay ** (last - layers[name])
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def scale_layers(optimizer: torch.optim.Optimizer, part: OptimizerPart) -> tuple[str, ...]:
    """Apply the groups' factors to the optimizer's rates, once; a line about them, if there are any.

    Raises:
        RecipeError: the optimizer has no learning rate.
    """
    scales = [group["lr_scale"] for group in optimizer.param_groups if "lr_scale" in group]
    if not scales:
        return ()
    if "lr" not in optimizer.param_groups[0]:
        raise RecipeError(
            f"optimizer.layer_decay is {part.layer_decay} but {part.name} has no learning rate",
            rule="the optimizer's parameter groups have an lr",
            do="set optimizer.layer_decay: null",
        )
    for group in optimizer.param_groups:
        group["lr"] *= group["lr_scale"]
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    return (f"layer decay {part.layer_decay}: {len(rates)} learning rates from {rates[0]:.3g} to {rates[-1]:.3g}",)


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter, from 0 at the input: timm's own numbers where the model is one of timm's.

    Elsewhere the members of the outermost lists of like modules (`ModuleList` or `Sequential`, all of one class) are
    the model's blocks, in the order in which it defines them. What is defined before the first block is layer 0, what
    stands after the last one is a layer of its own, and what stands between two belongs to the one before.

    Raises:
        RecipeError: there are no such lists.
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
            f"optimizer.layer_decay is set but {type(model).__name__} has no list of like blocks",
            rule="a model of timm's, or one with a ModuleList or Sequential of modules of one class",
            do="set optimizer.layer_decay: null",
        )
    numbers, reached = {}, 0
    for name, _ in model.named_parameters():
        inside = next((number for number, block in enumerate(blocks, start=1) if name.startswith(block)), None)
        reached = reached if inside is None else inside
        is_after = inside is None and reached == len(blocks)
        numbers[name] = len(blocks) + 1 if is_after else reached
    return numbers


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """The names, with a dot at their end, of the members of the outermost lists of like modules."""
    children = dict(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len(children) > 1 and len({type(child) for child in children.values()}) == 1:
        if any(True for _ in module.parameters()):
            yield from (f"{prefix}{name}." for name in children)
        return
    for name, child in children.items():
        yield from _blocks(child, f"{prefix}{name}.")


def _spared(model: nn.Module) -> set[str]:
    """Parameters that the model itself wants without weight decay, such as timm's position embeddings."""
    own = getattr(model, "no_weight_decay", None)
    return set(own()) if callable(own) else set()
