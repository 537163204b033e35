"""Tensor parallelism: linear layers, embeddings and attention heads divided into slices, and slices among ranks.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).

The forwards of divided modules are not compiled: a compiled kernel can contain all slices of a rank, with bits that
depend on their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.config import StepConfig
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.random_functions import dropout_mask, is_random
from samestep.strategies.tensor_plan import HEADS, divided_dims, head_count, plan_error, resolve_plan
from samestep.strategies.tensor_slices import Parts, SlicedTensor, Slicing, add, checked_forward, divide, join, spread

_HEAD_DIM = 1  # of scores `(N, heads, T, T)`


class DividedForward(ABC):
    """Forward of a module in place of that of its class.

    Args:
        module: the module; its attribute `forward` is set.
        slicing: the slices of all ranks.
    """

    def __init__(self, module: nn.Module, slicing: Slicing) -> None:
        self._module, self._slicing = module, slicing
        module.forward = self

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the slices of this rank."""


class DividedProduct(DividedForward):
    """Linear layer or embedding, divided along outputs (`column`, `column_gathered`) or inputs (`row`).

    A full tensor is an operand of every slice, and its gradient is the sum over slices in tree order; so is the result
    of a `row`. The result of a `column` is a `SlicedTensor`, which does not mix with full tensors.
    """

    def __init__(self, name: str, module: nn.Module, kind: str, slicing: Slicing) -> None:
        if "forward" in vars(module):
            raise _recompute_error(name)
        super().__init__(module, slicing)
        self._kind, self._dims = kind, divided_dims(module, kind)
        self._attention: tuple[list[tuple[torch.Tensor, ...]], int] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for one full or divided tensor."""
        (inputs,) = (*args, *kwargs.values())
        if self._attention is not None:
            weights, number = self._attention
            return self._product(inputs, *weights[number])
        if self._kind == "row":
            return self._row(inputs)
        full = inputs.join() if isinstance(inputs, SlicedTensor) else inputs
        copies = spread(full, self._slicing)
        results = [self._product(copy, *own) for copy, own in zip(copies, self._parameters(), strict=True)]
        if self._kind == "column":
            return SlicedTensor(tuple(results), self._slicing, results[0].dim() - 1)
        return join(results, self._slicing, results[0].dim() - 1)

    def begin_attention(self) -> None:
        """Prepare the parameters of all slices: a use per slice would add zeros to their gradients."""
        self._attention = list(self._parameters()), 0

    def select(self, number: int) -> None:
        """Compute one slice of this rank in the next calls, within an attention with divided heads."""
        assert self._attention is not None
        self._attention = self._attention[0], number

    def end_attention(self) -> None:
        """Drop the parameters of slices."""
        self._attention = None

    def _row(self, inputs: torch.Tensor | SlicedTensor) -> torch.Tensor:
        last = inputs.dim() - 1
        if isinstance(inputs, SlicedTensor) and inputs.divided_dim == last:
            parts = inputs.parts
        else:
            full = inputs.join() if isinstance(inputs, SlicedTensor) else inputs
            parts = divide(full, self._slicing, last)
        pairs = zip(parts, self._slices("weight"), strict=True)
        total = add([self._product(part, weight) for part, weight in pairs], self._slicing)
        bias = getattr(self._module, "bias", None)
        return total if bias is None else total + bias.to(total.dtype)

    def _product(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        module = self._module
        if isinstance(module, nn.Embedding):
            return functional.embedding(
                inputs, weight, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq
            )
        # The weight of `Conv1D` is transposed.
        return functional.linear(inputs, weight if isinstance(module, nn.Linear) else weight.t(), bias)

    def _parameters(self) -> list[tuple[torch.Tensor, ...]]:
        names = [name for name in self._dims if getattr(self._module, name, None) is not None]
        return list(zip(*(self._slices(name) for name in names), strict=True))

    def _slices(self, name: str) -> Parts:
        parameter = getattr(self._module, name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return self._slicing.divide_local(local, self._dims[name])


class DividedAttention(DividedForward):
    """Attention with divided heads: plain tensors of the heads of one slice inside, a divided result.

    Queries, keys and values are `column` modules. The forward must derive the number of heads from tensor sizes, as
    BERT's does. It is called once per slice of this rank.
    """

    def __init__(self, name: str, module: nn.Module, columns: Sequence[DividedProduct], slicing: Slicing) -> None:
        if "forward" in vars(module):
            raise _recompute_error(name)
        self._forward: Callable[..., Any] = module.forward
        super().__init__(module, slicing)
        self._name, self._columns = name, columns

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module, with divided tensors in place of tensors."""
        values, structure = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, SlicedTensor))
        values = [value.join() if isinstance(value, SlicedTensor) else value for value in values]
        count = len(self._slicing.owned)
        # Queries, keys and values share a copy per slice: their gradients are communicated together.
        copies = [
            spread(value, self._slicing) if isinstance(value, torch.Tensor) else (value,) * count for value in values
        ]
        masks: list[Parts] = []
        results = []
        for column in self._columns:
            column.begin_attention()
        try:
            for number in range(count):
                for column in self._columns:
                    column.select(number)
                own_args, own_kwargs = tree_unflatten([copy[number] for copy in copies], structure)
                with _HeadDropout(self._name, head_count(self._module) or 0, self._slicing, masks, number):
                    results.append(self._forward(*own_args, **own_kwargs))
        finally:
            for column in self._columns:
                column.end_attention()
        if isinstance(results[0], torch.Tensor):
            return self._as_divided(results)
        columns = zip(*results, strict=True)
        return tuple(self._as_divided(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns)

    def _as_divided(self, parts: Sequence[torch.Tensor]) -> SlicedTensor:
        dim = parts[0].dim()
        return SlicedTensor(tuple(parts), self._slicing, _HEAD_DIM if dim == 4 else dim - 1)


class _HeadDropout(TorchFunctionMode):
    """Dropout of the scores of the heads of one slice with the masks of all heads.

    `masks` are the masks of this rank in the order of calls, drawn in the first slice of this rank.
    """

    def __init__(self, name: str, heads: int, slicing: Slicing, masks: list[Parts], number: int) -> None:
        super().__init__()
        self._name, self._heads, self._slicing = name, heads, slicing
        self._masks, self._number, self._calls = masks, number, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if is_random(func, args, kwargs):
            raise self._unsupported(func.__name__)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        if input.dim() != 4 or input.shape[_HEAD_DIM] * self._slicing.count != self._heads:
            raise self._unsupported(f"dropout of a tensor {tuple(input.shape)}")
        if self._number == 0:
            shape = (input.shape[0], self._heads, *input.shape[2:])
            mask = dropout_mask(shape, p, dtype=input.dtype, device=input.device)
            self._masks.append(self._slicing.divide(mask, _HEAD_DIM))
        self._calls += 1
        return input * self._masks[self._calls - 1][self._number]

    def _unsupported(self, call: str) -> InputError:
        return InputError(
            f"{call} in {self._name}, whose heads are divided",
            expected="the only random function in it is torch.nn.functional.dropout of the scores (N, heads, T, T)",
            fix="use eager attention (attn_implementation: eager), or step.tensor_plan: column_gathered for its layers",
            code="E_TENSOR_PLAN",
        )


def _recompute_error(name: str) -> InputError:
    return plan_error(
        f"activation checkpointing of {name}, which step.tensor_plan divides",
        expected="a checkpointed module contains all of a divided module",
        fix=f"set step.recompute to a module around {name}",
    )


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
            code="E_TENSOR_PLAN",
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
            fix="set column for its queries, keys and values, or column_gathered for its modules in place of heads",
        )


def _divide_parameter(module: nn.Module, key: str, dim: int, mesh: DeviceMesh) -> None:
    parameter = module.get_parameter(key)
    part = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    # Cloned: a view would keep the full tensor in memory.
    local = part.clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    module.register_parameter(key, nn.Parameter(tensor, parameter.requires_grad))
