"""Tensor parallelism: linear layers, embeddings and attention heads divided among the ranks of the tensor axis.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.dtensor_rng import dropout_mask, install_checks, is_random

# Built-in plans by class of block. If one layer computes queries, keys and values together, its divided result does
# not hold complete heads: attention receives the gathered result.
_GPT2 = {"attn.c_attn": "column_gathered", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
_VIT = {"attn.qkv": "column_gathered", "attn.proj": "row", "mlp.fc1": "column", "mlp.fc2": "row"}
_TOKENS = {"mixed": "column_gathered", "joined": "row", "layers.0": "column", "layers.2": "row"}
_BERT = {
    "attention.self": "heads",
    **{f"attention.self.{layer}": "column" for layer in ("query", "key", "value")},
    "attention.output.dense": "row",
    "intermediate.dense": "column",
    "output.dense": "row",
}
_PLANS = {
    "samestep.zoo.text.models._Block": _GPT2,
    "samestep.zoo.text.tokens._Block": _TOKENS,
    "timm.models.vision_transformer.Block": _VIT,
    "torchvision.models.vision_transformer.EncoderBlock": {"mlp.0": "column", "mlp.3": "row"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    "transformers.models.roberta.modeling_roberta.RobertaLayer": _BERT,
}
_HEADS = "heads"
_KINDS = ("column", "column_gathered", "row", _HEADS)
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_HEAD_DIM = 1  # of scores `(N, heads, T, T)`
_MAX_SUGGESTED = 64  # size of a tensor axis in a `fix` line
_plan_error = partial(InputError, code="E_TENSOR_PLAN")


def parallelize(model: nn.Module, world: World) -> None:
    """Divide the modules of the plan among the ranks of the tensor axis, in place.

    All other parameters remain complete and equal on these ranks.

    Raises:
        InputError: there is no plan, or the plan does not fit the model or the number of ranks.
    """
    assert world.mesh is not None
    plan = resolve_plan(model, world.strategy.plan, world.mesh_shape.tensor)
    parallelize_module(model, world.mesh["tensor"], {name: _style(name, plan) for name in plan})
    install_checks(model)


def _style(name: str, plan: Mapping[str, str]) -> ParallelStyle:
    if plan[name] == _HEADS:
        return _AttentionHeads(name)
    in_attention = any(kind == _HEADS and name.startswith(f"{outer}.") for outer, kind in plan.items())
    return _DividedLinear(name, plan[name], in_attention=in_attention)


def builtin_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan for blocks of known classes: kinds by module name; empty if the model has no such block."""
    plan: dict[str, str] = {}
    for name, block in model.named_modules():
        modules = dict(block.named_modules())
        for cls in type(block).__mro__:
            kinds = _PLANS.get(f"{cls.__module__}.{cls.__qualname__}", {})
            plan |= {f"{name}.{inner}".lstrip("."): kind for inner, kind in kinds.items() if inner in modules}
    return plan


def resolve_plan(model: nn.Module, patterns: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the kind of each divided module, by name, for a tensor axis of `ranks`.

    `patterns` are kinds by shell pattern of module names, the last match wins; empty for the built-in plan.

    Raises:
        InputError: there is no plan, or the plan does not fit.
    """
    plan = _match(model, patterns) if patterns else builtin_plan(model)
    if not plan:
        raise _missing_plan(model, ranks)
    _require_unshared_weights(model, plan)
    _require_even_sizes(model, plan, ranks)
    return plan


def _match(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    for pattern, kind in patterns.items():
        if kind not in _KINDS:
            close = get_close_matches(kind, _KINDS, n=1, cutoff=0.3)
            raise _plan_error(
                f"strategy.plan: {pattern!r} is {kind!r}",
                expected=f"one of {', '.join(_KINDS)}",
                fix=f"did you mean {close[0] if close else _KINDS[1]}?",
            )
    plan: dict[str, str] = {}
    for pattern, kind in patterns.items():
        matches = [name for name in _candidates(model, kind) if fnmatchcase(name, pattern)]
        if not matches:
            raise _no_match(model, pattern, kind)
        plan |= dict.fromkeys(matches, kind)
    return plan


def _candidates(model: nn.Module, kind: str = "column") -> list[str]:
    """Return names of the modules that can be divided with a kind."""
    if kind == _HEADS:
        return [name for name, module in model.named_modules() if name and _head_count(module)]
    # nn.MultiheadAttention reads the weights of its children and does not call them.
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    uncalled = {child for module in attentions for child in module.modules()}
    modules = {name: module for name, module in model.named_modules() if name and module not in uncalled}
    return [name for name, module in modules.items() if _is_divisible(module, kind)]


def _is_divisible(module: nn.Module, kind: str) -> bool:
    """Return whether a module has a weight that can be divided; a weight of `parametrize` is computed and cannot."""
    # The linear layer of GPT-2 in transformers, which has a transposed weight.
    is_conv1d = any(cls.__name__ == "Conv1D" and hasattr(module, "nf") for cls in type(module).__mro__)
    is_embedding = isinstance(module, nn.Embedding) and kind != "row"
    is_supported = isinstance(module, nn.Linear) or is_conv1d or is_embedding
    return is_supported and "weight" in dict(module.named_parameters(recurse=False))


def _head_count(module: nn.Module) -> int | None:
    counts = (getattr(module, name, None) for name in _HEAD_COUNTS)
    return next((count for count in counts if isinstance(count, int)), None)


def _divided_dims(module: nn.Module, kind: str) -> dict[str, int]:
    """Return the divided dimension of each parameter; parameters without one are replicated."""
    outputs = 0 if isinstance(module, nn.Linear) else 1
    return {"weight": 1 - outputs} if kind == "row" else {"weight": outputs, "bias": 0}


def _no_match(model: nn.Module, pattern: str, kind: str) -> InputError:
    classes = {name: type(module).__name__ for name, module in model.named_modules() if name}
    matches, possible = [name for name in classes if fnmatchcase(name, pattern)], _candidates(model, kind)
    if matches:
        return _plan_error(
            f"strategy.plan: {pattern!r} is {kind!r} and matches {matches[0]} ({classes[matches[0]]})",
            expected="column and column_gathered divide torch.nn.Linear and Embedding, row divides Linear, heads an "
            "attention module with an attribute for the number of heads",
            fix=f"remove {pattern!r}, or name one of {', '.join(possible[:3]) or 'another model'}",
        )
    close = get_close_matches(pattern, possible, n=3, cutoff=0.3) or possible[:3]
    return _plan_error(
        f"strategy.plan: {pattern!r} matches no module",
        expected="shell patterns of module names, such as blocks.*.fc1",
        fix=f"use names such as {', '.join(close)}" if close else f"remove it: no module of this model can be {kind}",
    )


def _missing_plan(model: nn.Module, ranks: int) -> InputError:
    names = _candidates(model)
    examples = ", ".join(f'"{name}": column_gathered' for name in names[:3]) or '"*": column_gathered'
    more = ", ..." if len(names) > 3 else ""
    return _plan_error(
        f"a tensor axis of {ranks} for a {type(model).__name__}, which has no built-in plan",
        expected="strategy.plan gives the kind of division by module name: column_gathered for any layer, column "
        "for one whose result passes through elementwise functions to a row layer",
        fix=f"--set 'strategy.plan={{{examples}{more}}}'",
    )


def _require_unshared_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for names in users.values():
        planned = [name for name in names if name in plan]
        if planned and len(names) > 1:
            raise _plan_error(
                f"{' and '.join(names)} share a weight, and strategy.plan divides {planned[0]}",
                expected="weights that several modules share are not divided",
                fix=f"remove {' and '.join(planned)} from strategy.plan",
            )


def _require_even_sizes(model: nn.Module, plan: Mapping[str, str], ranks: int) -> None:
    sizes = {name: _divided_size(model.get_submodule(name), kind) for name, kind in plan.items()}
    common = math.gcd(*(size for _, size in sizes.values()))
    for name, (dimension, size) in sizes.items():
        if size % ranks:
            fits = [str(number) for number in range(2, min(common, _MAX_SUGGESTED) + 1) if common % number == 0]
            raise InputError(
                f"{name} has {size} {dimension}, not divisible by a tensor axis of {ranks}",
                expected="the tensor axis divides the size of every module of the plan",
                fix=f"--mesh tensor={fits[-1]} (possible: {', '.join(fits)})"
                if fits
                else f"no size divides all modules of the plan: remove {name} from strategy.plan",
                code="E_TENSOR_AXIS",
            )


def _divided_size(module: nn.Module, kind: str) -> tuple[str, int]:
    """Return name and size of the divided dimension."""
    if kind == _HEADS:
        return "heads", _head_count(module) or 0
    size = module.get_parameter("weight").shape[_divided_dims(module, kind)["weight"]]
    return ("inputs" if kind == "row" else "outputs"), size


class _DividedLinear(ParallelStyle):
    """Linear layer or embedding, divided along outputs (`column`) or inputs (`row`).

    A result that stays divided is a DTensor, which torch does not combine with a plain tensor: plain tensors are always
    complete and equal on every rank. Exception: in an attention with divided heads, a divided result is returned as a
    plain tensor, this rank's part.
    """

    def __init__(self, name: str, kind: str, *, in_attention: bool) -> None:
        super().__init__()
        self._name, self._kind, self._in_attention = name, kind, in_attention

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._prepare_inputs, self._prepare_outputs)

    def _divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        dims = _divided_dims(module, self._kind)
        for key, parameter in list(module.named_parameters(recurse=False)):
            tensor, dim = parameter.detach(), dims.get(key)
            placement = Replicate() if dim is None else Shard(dim)
            if dim is not None:
                part = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
                # Cloned: a view would keep the full tensor in memory.
                tensor = part.clone(memory_format=torch.contiguous_format)
            local = DTensor.from_local(tensor, mesh, [placement], run_check=False)
            module.register_parameter(key, nn.Parameter(local, parameter.requires_grad))

    def _prepare_inputs(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        if not inputs:
            raise _plan_error(
                f"the module {self._name!r}, divided along the tensor axis, is called with keyword arguments only",
                expected="the input is the first positional argument",
                fix=f"call it as {self._name.rpartition('.')[2]}(x), or remove it from strategy.plan",
            )
        tensor, *others = inputs
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        placement = Shard(tensor.dim() - 1) if self._kind == "row" else Replicate()
        # Without the condition, gradients of several modules would be summed before they are communicated.
        if tuple(tensor.placements) != (placement,):
            tensor = tensor.redistribute(placements=[placement])
        return (tensor, *others)

    def _prepare_outputs(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if self._kind == "column":
            return outputs.to_local() if self._in_attention else outputs
        return outputs.redistribute(placements=[Replicate()]).to_local()


class _AttentionHeads(ParallelStyle):
    """Attention with divided heads: plain tensors of this rank's heads inside, a divided result.

    Queries, keys and values are `column` modules. The forward must derive the number of heads from tensor sizes, as
    BERT's does.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if "forward" in vars(module):
            raise _plan_error(
                f"activation checkpointing of {self._name}, whose heads strategy.plan divides",
                expected="a checkpointed module contains all of an attention",
                fix=f"set step.recompute to a module around {self._name}",
            )
        module.forward = partial(self._forward, module, module.forward, device_mesh)
        return module

    def _forward(self, module: nn.Module, forward: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], DTensor):
            # One DTensor for queries, keys and values: their gradients are communicated together.
            args = (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:])
        with _LocalHeads(self._name, _head_count(module) or 0, mesh):
            outputs = forward(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            return _as_divided(outputs, mesh)
        return tuple(_as_divided(value, mesh) if isinstance(value, torch.Tensor) else value for value in outputs)


class _LocalHeads(TorchFunctionMode):
    """Dropout of the scores of this rank's heads with the masks of one process."""

    def __init__(self, name: str, heads: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self._name, self._heads, self._mesh = name, heads, mesh

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
        if input.dim() != 4 or input.shape[_HEAD_DIM] * self._mesh.size() != self._heads:
            raise self._unsupported(f"dropout of a tensor {tuple(input.shape)}")
        return input * dropout_mask(_as_divided(input, self._mesh), p).to_local()

    def _unsupported(self, call: str) -> InputError:
        return InputError(
            f"{call} in {self._name}, whose heads are divided",
            expected="the only random function in it is torch.nn.functional.dropout of the scores (N, heads, T, T)",
            fix="use eager attention (attn_implementation: eager), or strategy.plan: column_gathered for its modules",
            code="E_DIVIDED_TENSOR",
        )


def _as_divided(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    dim = _HEAD_DIM if tensor.dim() == 4 else tensor.dim() - 1
    return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
