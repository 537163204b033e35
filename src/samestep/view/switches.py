"""Switches of a forward: plain values on which a verdict depends, in attributes, closures, globals and classes.

A factor of zero hides what it multiplies, and the same operations join samples or not along other dimensions. So bools,
strings and whether numbers are zero belong to the kind of a call; `exact` values are facts that modules share.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.view.reachable import is_library_class, is_library_file

_PLAIN = (bool, str, type(None))
_NUMBERS = (int, float)
_ITEMS = 64  # of a container; larger ones are data
_DEPTH = 4
_LARGEST_DIMENSION = 3
_GLOBAL_OPERATIONS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
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
    if kind in _PLAIN:
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
    for cell in function.__closure__ or ():
        try:
            values = (*values, cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return (function.__code__, *[switch(value, exact=exact, depth=depth + 1) for value in values])


def has_settings(value: Any) -> bool:
    """Whether a value is an object with attributes that may be switches."""
    return not isinstance(value, _NO_SETTINGS) and isinstance(getattr(value, "__dict__", None), dict)


class Outside:
    """Switches outside of a module that the code of its forward names: globals, settings, variables of classes.

    Code of installed libraries is not read.

    Args:
        parts: `submodules` of the module.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._names: set[str] = set()
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self._seen: set[int] = set()
        self._owners: list[Mapping[str, Any]] = []
        self._todo: list[types.FunctionType] = []
        for kind in {type(part): None for part in parts}:
            self._add_class(kind)
        for part in parts:
            own = [value for name, value in vars(part).items() if name not in _MODULE_ATTRIBUTES]
            hooks = [hook for name in _HOOKS for hook in getattr(part, name).values()]
            for value in (*own, *hooks):
                self._add_value(value)
        while self._todo:
            self._read(self._todo.pop())
        for namespace in self._owners:
            for name in self._names & namespace.keys():
                if not name.startswith("__"):
                    self._places[id(namespace), name] = (namespace, name)
        settings = (*_PLAIN, *_NUMBERS, tuple, list, dict)
        self._switches = [
            place
            for place in self._places.values()
            if type(place[0].get(place[1])) in settings or has_settings(place[0].get(place[1]))
        ]

    def key(self) -> Hashable:
        """Return the present switches."""
        return tuple(self._switch(namespace.get(name)) for namespace, name in self._switches)

    def _switch(self, value: Any) -> Hashable:
        if not has_settings(value):
            return switch(value)
        attributes = vars(value)
        return tuple(switch(attributes[name]) for name in attributes if name in self._names)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or is_library_class(base):
                continue
            self._seen.add(id(base))
            self._owners.append(vars(base))
            for name, value in vars(base).items():
                if name != "__init__":
                    self._add_value(value)

    def _add_value(self, value: Any) -> None:
        """Follow a function, class or Python module."""
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            if id(value) not in self._seen and not is_library_file(value.__code__.co_filename):
                self._seen.add(id(value))
                self._todo.append(value)
        elif isinstance(value, type):
            if not issubclass(value, nn.Module):
                self._add_class(value)
        elif isinstance(value, types.ModuleType) and id(value) not in self._seen:
            self._seen.add(id(value))
            file = getattr(value, "__file__", None)
            if file is not None and not is_library_file(file):
                self._owners.append(vars(value))

    def _read(self, function: types.FunctionType) -> None:
        namespace = function.__globals__
        codes = [function.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            self._names.update(code.co_names)
            if namespace.keys().isdisjoint(code.co_names):
                continue
            for step in dis.get_instructions(code):
                if step.opname in _GLOBAL_OPERATIONS and step.argval in namespace:
                    self._places[id(namespace), step.argval] = (namespace, step.argval)
                    self._add_value(namespace[step.argval])
        for cell in function.__closure__ or ():
            try:
                self._add_value(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
