"""Plans of divided matrix products: the kind of division of each module, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from samestep.errors import InputError

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
_MAX_SUGGESTED = 64  # number of slices in a `fix` line
plan_error = partial(InputError, code="E_STRATEGY")


def builtin_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan for blocks of known classes: kinds by module name; empty if the model has no such block."""
    plan: dict[str, str] = {}
    for name, block in model.named_modules():
        modules = dict(block.named_modules())
        for cls in type(block).__mro__:
            kinds = _PLANS.get(f"{cls.__module__}.{cls.__qualname__}", {})
            plan |= {
                f"{name}.{inner}".lstrip("."): kind
                for inner, kind in kinds.items()
                if inner in modules
            }
    return plan


def resolve_plan(model: nn.Module, patterns: Mapping[str, str], slices: int) -> dict[str, str]:
    """Return the kind of each divided module, by name, for a number of slices.

    `patterns` are kinds by shell pattern of module names, the last match wins; empty for the
    built-in plan.

    Raises:
        InputError: there is no plan, or the plan does not fit.
    """
    plan = _match(model, patterns) if patterns else builtin_plan(model)
    if not plan:
        raise _missing_plan(model, slices)
    _require_unshared_weights(model, plan)
    _require_even_sizes(model, plan, slices)
    return plan


def _match(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    plan: dict[str, str] = {}
    for pattern, kind in patterns.items():
        if kind not in _KINDS:
            raise plan_error(
                f"step.tensor_plan: {pattern!r} is {kind!r}",
                f"one of {', '.join(_KINDS)}",
                "use one of these kinds",
            )
        matches = [name for name in _candidates(model, kind) if fnmatchcase(name, pattern)]
        if not matches:
            raise _no_match(model, pattern, kind)
        plan |= dict.fromkeys(matches, kind)
    return plan


def _candidates(model: nn.Module, kind: str = "column") -> list[str]:
    """Return names of the modules that can be divided with a kind."""
    # nn.MultiheadAttention reads the weights of its children and does not call them.
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    uncalled = {child for module in attentions for child in module.modules()}
    modules = {
        name: module for name, module in model.named_modules() if name and module not in uncalled
    }
    return [name for name, module in modules.items() if _is_divisible(module, kind)]


def _is_divisible(module: nn.Module, kind: str) -> bool:
    """Return whether a module has the forward of a known class, with a weight that can be divided.

    A weight of `parametrize` is computed and cannot; an embedding with `max_norm` uses complete
    rows.
    """
    classes: list[type[nn.Module]] = [nn.Linear] if kind == "row" else [nn.Linear, nn.Embedding]
    # The linear layer of GPT-2 in transformers, which has a transposed weight.
    classes += [
        cls for cls in type(module).__mro__ if cls.__name__ == "Conv1D" and hasattr(module, "nf")
    ]
    is_known = any(
        isinstance(module, cls) and type(module).forward is cls.forward for cls in classes
    )
    has_weight = "weight" in dict(module.named_parameters(recurse=False))
    return is_known and has_weight and getattr(module, "max_norm", None) is None


def divided_dims(module: nn.Module, kind: str) -> dict[str, int]:
    """Return the divided dimension of each parameter; parameters without one are replicated."""
    outputs = 0 if isinstance(module, nn.Linear) else 1
    if kind == "row":
        return {"weight": 1 - outputs}
    return {"weight": outputs, "bias": 0}


def _no_match(model: nn.Module, pattern: str, kind: str) -> InputError:
    possible = _candidates(model, kind)
    close = get_close_matches(pattern, possible, n=3, cutoff=0.3) or possible[:3]
    return plan_error(
        f"step.tensor_plan: {pattern!r} matches no module that can be {kind!r}",
        expected="a shell pattern of module names, such as blocks.*.fc1: column and column_gathered divide "
        "torch.nn.Linear and Embedding, row divides Linear",
        fix=f"name one of {', '.join(close) or 'another model'}, or remove the pattern",
    )


def _missing_plan(model: nn.Module, slices: int) -> InputError:
    names = _candidates(model)
    examples = (
        ", ".join(f'"{name}": column_gathered' for name in names[:3]) or '"*": column_gathered'
    )
    return plan_error(
        f"{slices} slices of a {type(model).__name__}, which has no built-in plan",
        expected="step.tensor_plan gives the kind of division by module name: column_gathered for any layer, column "
        "for one whose result passes through elementwise functions to a row layer",
        fix=f"--set 'step.tensor_plan={{{examples}}}'",
    )


def _require_unshared_weights(model: nn.Module, plan: Mapping[str, str]) -> None:
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for names in users.values():
        planned = [name for name in names if name in plan]
        if planned and len(names) > 1:
            raise plan_error(
                f"{' and '.join(names)} share a weight, and step.tensor_plan divides {planned[0]}",
                expected="weights that several modules share are not divided",
                fix=f"remove {' and '.join(planned)} from step.tensor_plan",
            )


def _require_even_sizes(model: nn.Module, plan: Mapping[str, str], slices: int) -> None:
    sizes: dict[str, int] = {}
    for name, kind in plan.items():
        module = model.get_submodule(name)
        sizes[name] = module.get_parameter("weight").shape[divided_dims(module, kind)["weight"]]
    common = math.gcd(*sizes.values())
    fits = [
        str(number) for number in range(2, min(common, _MAX_SUGGESTED) + 1) if common % number == 0
    ]
    fix = "no size divides all modules of the plan: remove some from step.tensor_plan"
    if fits:
        fix = f"--set step.tensor_slices={fits[-1]} (possible: {', '.join(fits)})"
    for name, size in sizes.items():
        if size % slices:
            dimension = "inputs" if plan[name] == "row" else "outputs"
            raise plan_error(
                f"{name} has {size} {dimension}, not divisible into {slices} slices",
                expected="step.tensor_slices, by default the size of the tensor axis, divides the size of every module "
                "of the plan",
                fix=fix,
            )
