"""Tensor parallelism in the calls of a module: divided weights stand in the places of parameters.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019).

The code of the module runs unchanged: a divided weight is an operand of `linear`, `embedding` and
`addmm`, so that a divided call has the operations of a whole one. Its result is a `SlicedTensor`,
or a full tensor by the plan, which gives the kind of division of each module by name.

Decisions: docs/decisions/layouts.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional

from samestep.errors import InputError
from samestep.strategies.dtensors import Division
from samestep.strategies.tensor_slices import (
    SlicedTensor,
    Slicing,
    divide,
    divided_error,
    join,
)
from samestep.view.crossings import enter, leave
from samestep.view.module_tensors import Entry, replaced
from samestep.view.region import Parts

_PRODUCTS = (functional.linear, functional.embedding, torch.addmm)
_ATTRIBUTES = ("dtype", "device", "requires_grad", "ndim", "is_cuda", "layout")

# Built-in plans by class of block. Attention receives gathered queries, keys and values.
_GPT2 = {
    "attn.c_attn": "column_gathered",
    "attn.c_proj": "row",
    "mlp.c_fc": "column",
    "mlp.c_proj": "row",
}
_VIT = {"attn.qkv": "column_gathered", "attn.proj": "row", "mlp.fc1": "column", "mlp.fc2": "row"}
_TOKENS = {"mixed": "column_gathered", "joined": "row", "layers.0": "column", "layers.2": "row"}
_BERT = {
    **{f"attention.self.{layer}": "column_gathered" for layer in ("query", "key", "value")},
    "attention.output.dense": "row",
    "intermediate.dense": "column",
    "output.dense": "row",
}
_PLANS = {
    "samestep.zoo.models._GPTBlock": _GPT2,
    "samestep.zoo.models._TokensBlock": _TOKENS,
    "timm.models.vision_transformer.Block": _VIT,
    "torchvision.models.vision_transformer.EncoderBlock": {"mlp.0": "column", "mlp.3": "row"},
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _GPT2,
    "transformers.models.bert.modeling_bert.BertLayer": _BERT,
    "transformers.models.roberta.modeling_roberta.RobertaLayer": _BERT,
}
_KINDS = ("column", "column_gathered", "row")
_plan_error = partial(InputError, code="E_STRATEGY")


@dataclass(frozen=True)
class Place:
    """Place of a divided parameter.

    Attributes:
        module: the module that holds it.
        key: its name there.
        name: its name in the whole model.
        dim: the divided dimension.
        kind: kind of division, as in the plan.
    """

    module: nn.Module
    key: str
    name: str
    dim: int
    kind: str


class DividedWeight:
    """A divided parameter during a call: an operand of torch's functions in place of it."""

    def __init__(self, local: torch.Tensor, place: Place, slicing: Slicing) -> None:
        self.local = local
        self.place = place
        self.slicing = slicing

    def parts(self) -> Parts:
        return self.slicing.divide_local(self.local, self.place.dim)

    @property
    def shape(self) -> torch.Size:
        shape = list(self.local.shape)
        shape[self.place.dim] *= self.slicing.ranks
        return torch.Size(shape)

    # Code that reads other attributes would compute with a part as if it were the parameter.
    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return getattr(self.local, name)
        raise _use_error(name, self.place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)]
        if func not in _PRODUCTS:
            raise _use_error(getattr(func, "__name__", str(func)), weights[0].place)
        return _product(func, list(args), kwargs or {})


def _use_error(name: str, place: Place) -> InputError:
    return divided_error(
        f"{name} of {place.name}", "a divided parameter is used by its own module alone"
    )


def _product(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the slices of this rank of a product with a divided weight.

    A full tensor is an operand of every slice, and its gradient is the sum over slices in tree
    order; so is the result of a `row`.
    """
    bias = None
    others: list[Any] = []
    if func is torch.addmm:  # of a transposed weight
        bias, inputs, weight = args
    else:
        inputs, weight, *others = args
    if func is functional.linear:
        bias = kwargs.get("bias", *others)  # by name or by position

    def one(
        part: torch.Tensor, own: torch.Tensor, own_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if func is functional.embedding:
            result: torch.Tensor = functional.embedding(part, own, *others, **kwargs)
            return result
        if func is torch.addmm:
            own = own.t()
        return functional.linear(part, own, own_bias)

    if not isinstance(weight, DividedWeight):
        raise divided_error(
            "a product of divided tensors", "a divided parameter is the weight of its module"
        )
    slicing = weight.slicing
    if weight.place.kind == "row":
        parts = inputs.parts if isinstance(inputs, SlicedTensor) else divide(inputs, slicing)
        results = [one(part, own) for part, own in zip(parts, weight.parts(), strict=True)]
        total = leave(results, slicing)
        # Once, to the sum: every slice has the whole bias.
        if bias is None:
            return total
        # Autocast rounds products; a bias of float32 would make the sum float32.
        return total + bias.to(total.dtype)
    # Each output needs all inputs, which a `column` before this one has left divided.
    if isinstance(inputs, SlicedTensor):
        inputs = inputs.join()
    own_inputs = enter(inputs, slicing, len(slicing.owned))
    operands: list[Sequence[Any]] = [own_inputs, weight.parts()]
    if bias is not None:
        operands.append(bias.parts())
    results = [one(*own) for own in zip(*operands, strict=True)]
    if weight.place.kind == "column":
        return SlicedTensor(tuple(results), slicing)
    return join(results, slicing)


class TensorParallel:
    """Division of the matrix products of a module into slices, and of their parameters, in place.

    On several ranks all parameters become DTensors. Those outside of the plan remain complete and
    equal on the ranks of the tensor axis, and so do their gradients.

    Args:
        module: the module.
        slicing: slices of all ranks.
        patterns: kinds of division by shell pattern of module names; empty for the built-in plan.
        mesh: ranks of the tensor axis, if there are several.

    Attributes:
        parameters: places of the divided parameters.

    Raises:
        InputError: there is no plan, or the plan does not fit the model or the number of slices.
    """

    def __init__(
        self,
        module: nn.Module,
        slicing: Slicing,
        patterns: Mapping[str, str],
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.slicing = slicing
        self.parameters: dict[nn.Parameter, Place] = {}
        for name, kind in resolve_plan(module, patterns, slicing.count).items():
            part = module.get_submodule(name)
            for key, dim in _divided_dims(part, kind).items():
                parameter = part._parameters.get(key)
                if parameter is not None:
                    self.parameters[parameter] = Place(part, key, f"{name}.{key}", dim, kind)
        if mesh is not None:
            self._divide(module, mesh)

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Put DTensors into the tables of parameters; those outside of the plan stay complete."""
        places = self.parameters
        divided: dict[nn.Parameter, nn.Parameter] = {}
        for one in module.parameters():
            # Also complete ones: torch does not mix DTensors and others in one list.
            placement: Placement = Replicate()
            if one in places:
                # Parts of one size: the plan requires sizes that the number of slices divides.
                placement = Shard(places[one].dim)
            division = Division(mesh, (placement,), one.shape, one.stride())
            # Cloned: a view would keep the full tensor in memory.
            part = division.of_part(division.local_part(one.detach()).clone())
            divided[one] = nn.Parameter(part, requires_grad=one.requires_grad)
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[key] = divided[parameter]
        self.parameters = {divided[one]: place for one, place in places.items()}

    def divided_weights(self) -> AbstractContextManager[None]:
        """Let the module compute with the tensors in the places of local parameters."""
        entries: list[Entry] = []
        for place in self.parameters.values():
            # The table itself: `setattr` of a module accepts nothing but parameters there.
            table = place.module._parameters
            value: Any = table[place.key]
            entries.append((table, place.key, value, DividedWeight(value, place, self.slicing)))
        return replaced(entries)


# --- plans ---------------------------------------------------------------------------------------


def resolve_plan(model: nn.Module, patterns: Mapping[str, str], slices: int) -> dict[str, str]:
    """Return the kind of each divided module, by name, for a number of slices.

    `patterns` are kinds by shell pattern of module names, the last match wins; empty for the
    built-in plan.

    Raises:
        InputError: there is no plan, or the plan does not fit.
    """
    plan: dict[str, str] = {}
    for pattern, kind in patterns.items():
        plan |= dict.fromkeys(_matches(model, pattern, kind), kind)
    if not patterns:
        plan = _builtin_plan(model)
    if not plan:
        names = _candidates(model, "column")[:3] or ["*"]
        examples = ", ".join(f'"{name}": column_gathered' for name in names)
        raise _plan_error(
            f"{slices} slices of a {type(model).__name__}, which has no built-in plan",
            expected="step.tensor_plan gives the kind of division by module name: column_gathered "
            "for any layer, column for one whose result passes through elementwise functions to a "
            "row layer",
            fix=f"'step.tensor_plan={{{examples}}}'",
        )
    _require_unshared_weights(model, plan)
    _require_even_sizes(model, plan, slices)
    return plan


def _builtin_plan(model: nn.Module) -> dict[str, str]:
    """Return kinds by module name for blocks of known classes; empty if there is no such block."""
    plan: dict[str, str] = {}
    for name, block in model.named_modules():
        modules = dict(block.named_modules())
        # Also for subclasses of a known block, and without the layers that a variant lacks.
        for cls in type(block).__mro__:
            for inner, kind in _PLANS.get(f"{cls.__module__}.{cls.__qualname__}", {}).items():
                if inner in modules:
                    plan[f"{name}.{inner}".lstrip(".")] = kind
    return plan


def _matches(model: nn.Module, pattern: str, kind: str) -> list[str]:
    """Return the names of the modules that a pattern divides with a kind."""
    if kind not in _KINDS:
        raise _plan_error(
            f"step.tensor_plan: {pattern!r} is {kind!r}",
            expected=f"one of {', '.join(_KINDS)}",
            fix="use one of these kinds",
        )
    possible = _candidates(model, kind)
    matches = [name for name in possible if fnmatchcase(name, pattern)]
    if not matches:
        close = get_close_matches(pattern, possible, n=3, cutoff=0.3) or possible[:3]
        raise _plan_error(
            f"step.tensor_plan: {pattern!r} matches no module that can be {kind!r}",
            expected="a shell pattern of module names, such as blocks.*.fc1: column and "
            "column_gathered divide torch.nn.Linear and Embedding, row divides Linear",
            fix=f"name one of {', '.join(close) or 'another model'}, or remove the pattern",
        )
    return matches


def _candidates(model: nn.Module, kind: str) -> list[str]:
    """Return names of the modules that can be divided with a kind."""
    # nn.MultiheadAttention reads the weights of its children and does not call them.
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    uncalled = {child for module in attentions for child in module.modules()}
    return [
        name
        for name, module in model.named_modules()
        if name and module not in uncalled and _is_divisible(module, kind)
    ]


def _is_divisible(module: nn.Module, kind: str) -> bool:
    """Whether a module has the forward of a known class, with a weight that can be divided.

    A weight of `parametrize` is computed and cannot; an embedding with `max_norm` uses complete
    rows.
    """
    classes: list[type[nn.Module]] = [nn.Linear]
    if kind != "row":
        classes.append(nn.Embedding)
    # The linear layer of GPT-2 in transformers, which has a transposed weight.
    classes += [
        cls for cls in type(module).__mro__ if cls.__name__ == "Conv1D" and hasattr(module, "nf")
    ]
    # A subclass with another forward may use its weight in another way.
    is_known = any(
        isinstance(module, cls) and type(module).forward is cls.forward for cls in classes
    )
    has_weight = "weight" in dict(module.named_parameters(recurse=False))
    return is_known and has_weight and getattr(module, "max_norm", None) is None


def _divided_dims(module: nn.Module, kind: str) -> dict[str, int]:
    """Return the divided dimension of each parameter; parameters without one are replicated."""
    # Outputs are the first dimension of `nn.Linear`, and the last of `nn.Embedding` and `Conv1D`.
    outputs = 0 if isinstance(module, nn.Linear) else 1
    if kind == "row":
        return {"weight": 1 - outputs}
    return {"weight": outputs, "bias": 0}


def _require_unshared_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for names in users.values():
        planned = [name for name in names if name in plan]
        if planned and len(names) > 1:
            shown = " and ".join(name or "the model" for name in names)
            raise _plan_error(
                f"{shown} share a weight, and step.tensor_plan divides {planned[0]}",
                expected="weights that several modules share are not divided",
                fix=f"remove {' and '.join(planned)} from step.tensor_plan",
            )


def _require_even_sizes(model: nn.Module, plan: Mapping[str, str], slices: int) -> None:
    sizes: dict[str, int] = {}
    for name, kind in plan.items():
        module = model.get_submodule(name)
        sizes[name] = module.get_parameter("weight").shape[_divided_dims(module, kind)["weight"]]
    common = math.gcd(*sizes.values())
    fix = "no size divides all modules of the plan: remove some from step.tensor_plan"
    if common > 1:
        fix = f"a step.tensor_slices that divides {common}"
    for name, size in sizes.items():
        if size % slices:
            dimension = "inputs" if plan[name] == "row" else "outputs"
            raise _plan_error(
                f"{name} has {size} {dimension}, not divisible into {slices} slices",
                expected="step.tensor_slices, by default the size of the tensor axis, divides the "
                "size of every module of the plan",
                fix=fix,
            )
