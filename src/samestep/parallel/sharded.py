"""Every parameter in parts, one a rank: torch's FSDP2, `fsdp` over all ranks and `hsdp` within groups of them.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from samestep.config import StrategyPart
from samestep.parallel.hand_out import hand_out, set_aside
from samestep.parallel.lane import done
from samestep.parallel.pieces import Pieces
from samestep.parallel.reduction import Reduction
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World

_MOST_UNITS = 200  # each is a message of its own, in forward and in backward


def divide(model: nn.Module, world: World) -> None:
    """Divide the parameters of `model`, in place, among the ranks of the shard axis."""
    part, mesh = world.strategy, world.mesh
    assert mesh is not None
    axes = mesh["replicate", "shard"] if world.layout.replicate > 1 else mesh["shard"]
    values = set_aside(model, world) if part.meta else {}
    for module, precision in _with_precision([*units(model), model], part):
        module.register_forward_hook(_without_views)  # before torch's own, which it is to serve
        fully_shard(module, mesh=axes, mp_policy=precision, offload_policy=_offload(part, world))
    if part.meta:
        hand_out(model, values, torch.device("cpu") if part.offload else world.device, world)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The engine divides by what was counted; and gloo has no sum that divides as it goes.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _with_precision(
    modules: Sequence[nn.Module], part: StrategyPart
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Modules from the inside out, the model last, with what they compute in; sums are kept in 32 bits."""
    full, half = torch.float32, torch.bfloat16
    if part.gather == "fp32":
        yield from ((module, MixedPrecisionPolicy()) for module in modules)
        return
    norms = [each for each in modules[-1].modules() if isinstance(each, _BatchNorm) and list(each.parameters())]
    # Running statistics have 32 bits, and torch's batch norm wants all it is given to be alike.
    yield from ((norm, MixedPrecisionPolicy(full, full, output_dtype=half)) for norm in norms)
    yield from ((module, MixedPrecisionPolicy(half, full)) for module in modules[:-1] if module not in norms)
    yield modules[-1], MixedPrecisionPolicy(half, full, output_dtype=full)


def units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together and given back before those of the next are used.

    The elements of lists of modules (the blocks of a transformer); in a model without any, its children. What is small,
    and parameters that several of them use, are gathered once for the whole forward.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    elements = dict.fromkeys(element for each in lists for element in each)
    inner = {below for element in elements for below in element.modules() if below is not element}
    found = [element for element in elements if element not in inner] or list(model.children())
    users = Counter(parameter for module in found for parameter in set(module.parameters()))
    least = sum(parameter.numel() for parameter in model.parameters()) / _MOST_UNITS
    return [
        module
        for module in found
        if sum(p.numel() for p in module.parameters()) > least and all(users[p] == 1 for p in module.parameters())
    ]


class ShardedStrategy:
    """Parameters are gathered before they are used, and gradients are summed into parts while backward runs."""

    sums_late = True

    def __init__(self, model: nn.Module, pieces: Pieces, reduction: Reduction, world: World) -> None:
        assert isinstance(model, FSDPModule)
        self.name = world.layout.name
        self.module: nn.Module = model
        self._root, self._pieces, self._reduction, self._world = model, pieces, reduction, world

    @contextmanager
    def shard(self, tree: ShardTree, shard: int, *, last: bool) -> Iterator[None]:
        self._root.set_requires_gradient_sync(last)
        yield
        if last:
            self._pieces.take_gradients()

    def sum_vectors(
        self, tree: ShardTree, vectors: Mapping[int, torch.Tensor], length: int
    ) -> torch.futures.Future[torch.Tensor]:
        return done(self._reduction.vector(tree, vectors, length))

    def abandon(self) -> None:
        self._root.set_requires_gradient_sync(True)

    def finish(self, tree: ShardTree) -> None:
        pass


def _without_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Outputs that are views, copied: whoever changed one in place would cut the thread by which parts are gathered."""
    return tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) and each._is_view() else each, outputs)


def _offload(part: StrategyPart, world: World) -> OffloadPolicy:
    # Pinned memory is of use to a GPU alone, and torch cannot make it without one.
    return CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if part.offload else OffloadPolicy()
