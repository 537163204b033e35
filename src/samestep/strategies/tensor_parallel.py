"""Tensor parallelism: linear layers, embeddings and attention heads divided into slices, and slices among ranks.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from samestep.config import StepConfig
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.divided_modules import DividedAttention, DividedForward, DividedProduct
from samestep.strategies.sliced_tensor import checked_forward
from samestep.strategies.slicing import Slicing
from samestep.strategies.tensor_plan import HEADS, divided_dims, plan_error, resolve_plan


def slice_model(model: nn.Module, world: World, config: StepConfig) -> dict[str, int]:
    """Compute the modules of the plan in slices, in place, and divide their parameters among a tensor axis.

    All other parameters remain complete and equal on the ranks of the tensor axis.

    Returns:
        The number of slices that a rank has of the columns of a parameter, by name, for `gradient_norm`.

    Raises:
        InputError: there is no plan, or the plan does not fit the model or the number of slices.
    """
    slicing = _slicing(world, config)
    if slicing.count == 1:
        return {}
    _restore(model)
    plan = resolve_plan(model, config.tensor_plan, slicing.count)
    products = {
        name: DividedProduct(name, model.get_submodule(name), kind, slicing)
        for name, kind in plan.items()
        if kind != HEADS
    }
    for name in (name for name, kind in plan.items() if kind == HEADS):
        inner = {key: products[key] for key in products if key.startswith(f"{name}.") and plan[key] == "column"}
        attention = model.get_submodule(name)
        _require_only_columns(name, attention, inner)
        DividedAttention(name, attention, list(inner.values()), slicing)
    if getattr(model.forward, "func", None) is not checked_forward:
        model.forward = partial(checked_forward, model.forward)
    columns = {}
    for name in products:
        module = model.get_submodule(name)
        for key, dim in divided_dims(module, plan[name]).items():
            if dim == 1:
                columns[f"{name}.{key}"] = len(slicing.owned)
            if world.mesh_shape.tensor > 1 and getattr(module, key, None) is not None:
                assert world.mesh is not None
                _divide_parameter(module, key, dim, world.mesh["tensor"])
    return columns


def slice_count(config: StepConfig, ranks: int) -> int:
    """Return the number of slices of matrix products with a tensor axis of `ranks` ranks.

    Raises:
        InputError: the slices of the recipe cannot be divided among the ranks.
    """
    count = config.tensor_slices if config.tensor_slices > 1 else ranks
    if count % ranks:
        raise InputError(
            f"step.tensor_slices is {count}, with a tensor axis of {ranks}",
            expected="a rank of the tensor axis computes complete slices, as many as every other rank",
            fix=f"--mesh tensor={max(size for size in range(1, ranks) if count % size == 0)}, or a multiple of {ranks} "
            "slices, with other results",
            code="E_TENSOR_AXIS",
        )
    return count


def _slicing(world: World, config: StepConfig) -> Slicing:
    ranks = world.mesh_shape.tensor
    count = slice_count(config, ranks)
    if ranks == 1:
        return Slicing(count, World(0, 1, world.device, world.context))
    assert world.mesh is not None
    tensor_world = world.subworld(world.mesh.get_group("tensor"))
    _ = tensor_world.sockets  # connects the ranks, a collective
    return Slicing(count, tensor_world)


def _restore(model: nn.Module) -> None:
    """Restore the forwards of classes: parameters of a complete model may change, and the model is sliced again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), DividedForward):
            del module.forward


def _require_only_columns(name: str, attention: nn.Module, columns: dict[str, DividedProduct]) -> None:
    """Refuse other parameters in an attention: their gradients would contain the heads of one slice."""
    divided = {f"{name}.{key}" for key, _ in attention.named_parameters()}
    others = sorted(key for key in divided if key.rpartition(".")[0] not in columns)
    if others or not columns:
        raise plan_error(
            f"step.tensor_plan: heads of {name}, which has {others[0] if others else 'no column'}",
            expected="all parameters of an attention with divided heads belong to modules that are `column`",
            fix=f"set column_gathered for its modules in place of heads, or column for {others[0].rpartition('.')[0]}"
            if others
            else "set column for its queries, keys and values",
        )


def _divide_parameter(module: nn.Module, key: str, dim: int, mesh: DeviceMesh) -> None:
    parameter = module.get_parameter(key)
    part = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    # Cloned: a view would keep the full tensor in memory.
    local = part.clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(key, nn.Parameter(tensor, parameter.requires_grad))
