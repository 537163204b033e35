"""What makes a step faster or smaller without changing what it means: layout, compilation, recomputation, TF32."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from samestep.config import StepRules
from samestep.config.patterns import chosen
from samestep.data.tensors import map_tensors
from samestep.errors import InputError
from samestep.runtime.world import World

_IMAGES = 4  # dimensions of a batch of images, to which channels-last applies


def prepare(model: torch.nn.Module, rules: StepRules, device: torch.device) -> None:
    """Change `model`, which is on `device` already, as the rules say; names of parameters stay what they are.

    Raises:
        InputError: a pattern matches no module, or switches exclude each other.
    """
    if device.type == "cuda":
        # torch's own default is TF32 for convolutions and not for products.
        torch.set_float32_matmul_precision("high" if rules.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = rules.tf32
    if rules.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if rules.recompute or rules.compile:
        _require_one_at_a_time(model, rules)
    for module in _named(model, rules.recompute):
        module.forward = partial(_recomputed, module.forward)
    if rules.compile:
        _compile(model)


def require_steady_scale(rules: StepRules, world: World) -> None:
    """Refuse to keep parts of gradients for later steps where these may be scaled otherwise.

    Raises:
        InputError: they would be.
    """
    if rules.precision == "fp16" and world.strategy.hook == "powersgd":
        raise InputError(
            "strategy.hook powersgd with step.precision fp16",
            rule="what a step does not send is added to the next one's gradients, of which fp16 changes the scale",
            do="set step.precision: bf16, or strategy.hook: fp16",
        )


def laid_out(data: Any, rules: StepRules) -> Any:
    """Inputs of a model in the layout that the rules ask for."""
    if not rules.channels_last:
        return data
    return map_tensors(data, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == _IMAGES else t)


def _recomputed(forward: Any, *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


def _named(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[torch.nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    named = chosen(modules, patterns, key="step.recompute", what="module", example="blocks.*")
    # What is inside of a module that is computed again is computed again with it.
    return [modules[name] for name in named if not any(name.startswith(f"{other}.") for other in named)]


def _compile(model: torch.nn.Module) -> None:
    # The draws of dropout are those that are not compiled make; and kernels for one size are made for it alone: which
    # sizes a rank has met before must not decide by which kernel it computes.
    torch._inductor.config.fallback_random = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    model.compile(dynamic=False)


def _require_one_at_a_time(model: torch.nn.Module, rules: StepRules) -> None:
    if rules.batch_norm == "sync" and any(isinstance(module, _BatchNorm) for module in model.modules()):
        which = "compile" if rules.compile else "recompute"
        raise InputError(
            f"step.{which} with step.batch_norm: sync",
            rule="batch norm over all shards runs copies of the model side by side, which neither compiled modules nor "
            "those that are computed again can do",
            do=f"set step.batch_norm: shard, or leave step.{which} out",
        )
