"""Switches of a forward: plain values on which a verdict depends, in attributes, closures, globals and classes.

A factor of zero hides the other factor, and the same operations join samples or not along other
dimensions. So bools, strings and whether numbers are zero belong to the kind of a call; `exact`
values are facts that modules share.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.view.reachable import Reachable, cells

PLAIN = (bool, str, type(None))
_NUMBERS = (int, float)
_SETTINGS = (*PLAIN, *_NUMBERS, tuple, list, dict)
SWITCHES = (*_SETTINGS, types.FunctionType, types.MethodType, partial)
_ITEMS = 64  # of a container; larger ones are data
_DEPTH = 4
_LARGEST_DIMENSION = 3
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)


def switch(value: Any, *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the facts of a value behind a verdict; None for objects that are neither plain nor code.

    Args:
        value: any value.
        exact: numbers count as they are, otherwise only zero and those that can be dimensions.
        depth: number of containers around the value.
    """
    kind = type(value)
    collected: Hashable = None
    if kind in PLAIN:
        collected = value
    elif kind in _NUMBERS:
        collected = value if exact else _number(value)
    elif depth > _DEPTH:
        collected = None
    elif kind is types.FunctionType or kind is types.MethodType or kind is partial:
        collected = code_of(value, exact=exact, depth=depth + 1)
    elif kind is tuple and len(value) <= _ITEMS:
        collected = tuple(switch(item, exact=exact, depth=depth + 1) for item in value)
    elif kind is list and len(value) <= _ITEMS:  # lists of numbers may grow with the steps
        counted = (bool, str, int) if exact else (bool, str)
        collected = tuple(switch(item, exact=exact) for item in value if type(item) in counted)
    elif isinstance(value, dict) and len(value) <= _ITEMS:
        collected = switches_of(value, exact=exact, depth=depth)
    return collected


def _number(number: float) -> Hashable:
    """Return a number that can be a dimension or a factor that hides a term; of others only the type."""
    if number == 0 or (isinstance(number, int) and abs(number) <= _LARGEST_DIMENSION):
        return number
    return type(number).__name__


def switches_of(values: Mapping[str, Any], *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the switches among named values, such as attributes of an object."""
    pairs = [(name, value) for name, value in values.items() if type(name) is str]
    collected = [(name, switch(value, exact=exact, depth=depth + 1)) for name, value in pairs]
    return tuple(pair for pair in collected if pair[1] is not None)


def code_of(function: Any, *, exact: bool = False, depth: int = 0) -> Hashable:
    """Return the code of a function, with plain values and functions in its closure, defaults or partial arguments."""
    if isinstance(function, partial):
        values = (*function.args, *function.keywords.items())
        inner = code_of(function.func, exact=exact, depth=depth + 1)
        return (inner, *[switch(value, exact=exact, depth=depth) for value in values])
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return type(function).__qualname__
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    values = (*values, *(cell.cell_contents for _, cell in cells(function)))
    return (function.__code__, *[switch(value, exact=exact, depth=depth + 1) for value in values])


def has_settings(value: Any) -> bool:
    """Whether a value is an object with attributes that may be switches."""
    return not isinstance(value, _NO_SETTINGS) and isinstance(
        getattr(value, "__dict__", None), dict
    )


class Outside:
    """Switches outside of a module that the code of its forward names: globals, settings, variables of classes.

    Args:
        parts: `submodules` of the module.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._variables: list[tuple[Mapping[str, Any], str]] = []
        if not parts:
            return
        hooks = [hook for name in HOOKS for hook in getattr(parts[0], name).values()]
        reachable = Reachable(parts[0], hooks)
        self._names = reachable.names
        for _, _, namespace, name in reachable.variables():
            value = namespace.get(name)
            if not name.startswith("__") and (type(value) in _SETTINGS or has_settings(value)):
                self._variables.append((namespace, name))

    def key(self) -> Hashable:
        """Return the present switches."""
        return tuple(self._switch(namespace.get(name)) for namespace, name in self._variables)

    def _switch(self, value: Any) -> Hashable:
        if not has_settings(value):
            return switch(value)
        attributes = vars(value)
        return tuple(switch(attributes[name]) for name in attributes if name in self._names)
