"""The tensor axis: which products of a model its ranks divide among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from samestep.errors import InputError
from samestep.parallel.divided import watch
from samestep.parallel.heads import Heads, heads_of
from samestep.parallel.plans import ready_plan
from samestep.parallel.product import Product, divided_size, is_product
from samestep.runtime.world import World

HEADS = "heads"
WORDS = ("column", "column_gathered", "row", HEADS)
_MOST = 64  # ranks of a tensor axis that an error suggests


def divide(model: nn.Module, world: World) -> None:
    """Divide the products of `model` that its plan names, in place, among the ranks of the tensor axis.

    Everything else stays whole, and the same on all of them.

    Raises:
        InputError: there is no plan, or it does not fit the model or the number of ranks.
    """
    assert world.mesh is not None
    words = plan_for(model, world.strategy.plan, world.layout.tensor)
    styles = {name: _style(name, words) for name in words}
    parallelize_module(model, world.mesh["tensor"], styles)
    watch(model)


def plan_for(model: nn.Module, plan: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The word for each module that so many ranks divide.

    Args:
        plan: words by shell patterns of names, of which the last that matches counts; empty for the ready plan.

    Raises:
        InputError: there is none, or it does not fit.
    """
    words = _chosen(model, plan) if plan else ready_plan(model)
    if not words:
        raise _no_plan(model, ranks)
    _require_own_weights(model, words)
    _require_even(model, words, ranks)
    return words


def _style(name: str, words: Mapping[str, str]) -> ParallelStyle:
    if words[name] == HEADS:
        return Heads(name)
    inside = any(word == HEADS and name.startswith(f"{other}.") for other, word in words.items())
    return Product(name, words[name], inside=inside)


def candidates(model: nn.Module, word: str = "column") -> list[str]:
    """The names of the modules that could be divided so."""
    if word == HEADS:
        return [name for name, module in model.named_modules() if name and heads_of(module)]
    # It takes the weights of its children and does not call them.
    callers = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    taken = {below for module in callers for below in module.modules()}
    named = model.named_modules()
    return [name for name, module in named if name and is_product(module, word) and module not in taken]


def _chosen(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    for pattern, word in plan.items():
        if word not in WORDS:
            close = get_close_matches(word, WORDS, n=1, cutoff=0.3)
            raise InputError(
                f"strategy.plan: {pattern!r} is {word!r}",
                rule=f"one of {', '.join(WORDS)}",
                do=f"did you mean {close[0] if close else WORDS[1]}?",
            )
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        matching = [name for name in candidates(model, word) if fnmatchcase(name, pattern)]
        if not matching:
            raise _no_match(model, pattern, word)
        found |= dict.fromkeys(matching, word)
    return found


def _no_match(model: nn.Module, pattern: str, word: str) -> InputError:
    names = {name: type(module).__name__ for name, module in model.named_modules() if name}
    matching, possible = [name for name in names if fnmatchcase(name, pattern)], candidates(model, word)
    if matching:
        return InputError(
            f"strategy.plan: {pattern!r} is {word!r}, and matches {matching[0]} ({names[matching[0]]})",
            rule="column and column_gathered divide torch.nn.Linear and Embedding, row divides Linear, heads an "
            "attention that says how many it has",
            do=f"leave {pattern!r} out, or name one of {', '.join(possible[:3]) or 'another model'}",
        )
    close = get_close_matches(pattern, possible, n=3, cutoff=0.3) or possible[:3]
    return InputError(
        f"strategy.plan: {pattern!r} matches no module",
        rule="shell patterns of module names, such as blocks.*.fc1",
        do=f"names like {', '.join(close)}" if close else f"leave it out: nothing here can be {word}",
    )


def _no_plan(model: nn.Module, ranks: int) -> InputError:
    names = candidates(model)
    shown = ", ".join(f'"{name}": column_gathered' for name in names[:3]) or '"*": column_gathered'
    more = ", ..." if len(names) > 3 else ""
    return InputError(
        f"a tensor axis of {ranks} for a {type(model).__name__}, for which there is no ready plan",
        rule="strategy.plan says for names of modules how ranks divide their products: column_gathered for any; column "
        "for one whose result goes, element by element, to one that is row",
        do=f"--set 'strategy.plan={{{shown}{more}}}'",
    )


def _require_own_weights(model: nn.Module, words: Mapping[str, str]) -> None:
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
    for names in users.values():
        planned = [name for name in names if name in words]
        if planned and len(names) > 1:
            raise InputError(
                f"{' and '.join(names)} have one weight, and strategy.plan divides {planned[0]}",
                rule="a weight that several modules use stays whole",
                do=f"leave {' and '.join(planned)} out of strategy.plan",
            )


def _require_even(model: nn.Module, words: Mapping[str, str], ranks: int) -> None:
    sizes = {name: _size(model.get_submodule(name), word) for name, word in words.items()}
    common = math.gcd(*(size for _, size in sizes.values()))
    for name, (what, size) in sizes.items():
        if size % ranks:
            fitting = [str(number) for number in range(2, min(common, _MOST) + 1) if common % number == 0]
            raise InputError(
                f"{name} has {size} {what}, which a tensor axis of {ranks} does not divide",
                rule="ranks get equal parts of every product of the plan",
                do=f"--mesh tensor={fitting[-1]}; {', '.join(fitting)} would do"
                if fitting
                else f"no size divides all of the plan: leave {name} out of strategy.plan",
            )


def _size(module: nn.Module, word: str) -> tuple[str, int]:
    return ("heads", heads_of(module) or 0) if word == HEADS else divided_size(module, word)
