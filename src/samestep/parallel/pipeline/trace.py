"""What a model's forward does, as a graph whose nodes are whole modules."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any

from torch import fx, nn

from samestep.errors import InputError


def trace(model: nn.Module, opened: Set[str] = frozenset(), *, training: bool) -> fx.Graph:
    """The graph of a forward, down to the children of `model` and the elements of its sequences.

    What is inside of modules is not looked at: whether they train, draw random numbers or keep statistics is asked
    when they run. What the model's own forward asks of `self.training` is answered here.

    Args:
        opened: names of modules that are looked into too.

    Raises:
        InputError: the forward does what depends on values.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        return _ChainTracer(model, opened).trace(model)
    except (fx.proxy.TraceError, TypeError, ValueError, AttributeError, RuntimeError, KeyError, IndexError) as error:
        raise InputError(
            f"the forward of {type(model).__name__} cannot be cut into stages: {type(error).__name__}: {error}",
            rule="for a pipeline, what stands between the calls of modules takes the same way whatever the values are",
            do="move such code into a module, or into a function given to torch.fx.wrap; or --strategy fsdp",
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode


def input_names(model: nn.Module) -> list[str]:
    """The arguments of a forward that have no default; the others keep theirs in a pipeline."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        each.name
        for each in _signature(model).parameters.values()
        if each.kind in plain and each.default is inspect.Parameter.empty
    ]


def bound(model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward by name.

    Raises:
        InputError: an argument is given that a pipeline leaves at its default.
    """
    positional, named = _prepared(model, positional, named)
    found = _signature(model).bind(*positional, **named).arguments
    names = input_names(model)
    extra = [name for name in found if name not in names]
    if extra:
        raise InputError(
            f"the data give the argument {extra[0]!r}, which has a default in the forward of {type(model).__name__}",
            rule="a model is cut into stages with the defaults of its forward, before any data are there",
            do=f"give the model a forward that takes {extra[0]} without a default, or --strategy fsdp",
        )
    return found


def _signature(model: nn.Module) -> inspect.Signature:
    """That of the forward that a class has; what another one was put around it for, stages do by themselves."""
    whole = inspect.signature(type(model).forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _prepared(
    model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs after the hooks that a call of the model would run before its forward."""
    for number, hook in model._forward_pre_hooks.items():
        if number in model._forward_pre_hooks_with_kwargs:
            positional, named = hook(model, positional, named) or (positional, named)
        elif (changed := hook(model, positional)) is not None:
            positional = changed if isinstance(changed, tuple) else (changed,)
    return positional, named


class _ChainTracer(fx.Tracer):
    def __init__(self, model: nn.Module, opened: Set[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._opened = opened
        self._inputs = input_names(model)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # What has another forward than its class (it is computed again in backward) is one thing.
        is_opened = module_qualified_name in self._opened or type(m).forward is nn.Sequential.forward
        return not is_opened or "forward" in vars(m)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        # torch's own makes inputs of arguments that have a default too, and then `x is None` is never so.
        proxies: list[Any] = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]
        kinds = _signature(self.root).parameters
        named = {name: proxy for name, proxy in zip(self._inputs, proxies, strict=True) if _by_name(kinds[name])}
        inline = [proxy for name, proxy in zip(self._inputs, proxies, strict=True) if name not in named]

        def forward(root: nn.Module, *arguments: Any) -> Any:
            return type(root).forward(root, *arguments, **named)

        return forward, [self.root, *inline]


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY
