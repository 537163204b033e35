"""Code of a script that runs in the backward of a call: functions of its own, and hooks of saved tensors.

A trial runs this code. Its changes outside of the backward cannot be seen in the watched call, which runs no
backward, so the code is read; and the values that it reaches are compared between the watched call and the trial.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn

from samestep.view.division import ComputedWhole
from samestep.view.reachable import Reachable, changed, codes, is_library_class, is_library_function, is_library_module

_FUNCTION = "has an autograd function whose backward keeps state"
_HOOK = "has a hook of saved tensors that keeps state"
_ENTRIES = ("forward", "backward", "vjp")
_MUTABLE = (list, dict, set, bytearray, collections.deque, collections.UserDict, collections.UserList)
_FOREIGN = (nn.Module, torch.Tensor, numpy.ndarray)
_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_VALUES = (bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device, torch.Tensor)
_CODE = (
    type,
    Enum,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
_WRITERS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "pop", "popleft"),
        *("popitem", "remove", "discard", "clear", "sort", "reverse", "rotate", "put", "fill"),
        *("load_state_dict", "setattr", "set", "register_buffer"),
    }
)
_FILES = frozenset({"open", "write", "writelines", "write_text", "write_bytes", "save", "dump", "savetxt", "system"})
_HARMLESS_ATTRIBUTES = frozenset({"grad", "requires_grad"})  # of copies of tensors, in a graph inside of the backward


class BackwardCode:
    """Code of the script that the backward of a watched call would run.

    Args:
        parts: the module and its submodules; a trial restores their state.
        nodes: nodes of the graph.
        hooks: functions that pack or unpack saved tensors.
    """

    def __init__(self, parts: Iterable[nn.Module], nodes: Iterable[Any], hooks: Iterable[Callable[..., Any]]) -> None:
        self._own: set[int] = set()  # functions with the context as first argument
        self._shared: list[Any] = []  # shared by contexts and other objects
        parts = list(parts)
        own = {id(part) for part in parts}
        roots: list[Any] = []
        for node in nodes:
            functions = list(_functions_of(node))
            if functions:
                roots += functions
                self._own.update(id(function) for function in functions)
                self._shared += [value for value in _shared_values(node) if id(value) not in own]
        self._words = _FUNCTION
        if not roots:
            self._words = _HOOK
        roots += [hook for hook in hooks if not is_library_function(hook)]
        self._reachable: Reachable | None = None
        if roots:
            self._reachable = Reachable(nn.Module(), (roots, self._shared), names=_ENTRIES, own=parts)
            self._before = self._reachable.digest()

    def reason(self) -> str | None:
        """Return a reason for whole calls if the code can write into objects that outlive a backward."""
        if self._reachable is None:
            return None
        if any(self._can_write(function) for function in self._reachable.functions()):
            return self._words
        return None

    def require_unchanged(self) -> None:
        """Require that the values within reach of the code have not changed since the watched call.

        Raises:
            ComputedWhole: it has, and so a trial would change it too.
        """
        if self._reachable is not None and changed(self._before, self._reachable.digest()) is not None:
            raise ComputedWhole(self._words)

    def _can_write(self, function: types.FunctionType) -> bool:
        assert self._reachable is not None
        names: set[str] = set()
        stores = False
        for code in codes(function.__code__):
            names.update(code.co_names)
            before: Any = None
            for step in dis.get_instructions(code):
                if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    return True
                if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in function.__code__.co_freevars:
                    return True
                if step.opname in ("STORE_ATTR", "DELETE_ATTR") and not self._is_harmless(function, before, step):
                    return True
                stores = stores or step.opname in _STORES
                before = step
        outside = [*self._reachable.values_of(function), *self._shared]
        outside += [item for value in outside for item in _named_items(value, names)]
        if names & _FILES or any(_advances(value) for value in outside):
            return True
        writes = stores or any(name in _WRITERS or _is_in_place(name) for name in names)
        return writes and any(_is_mutable(value) for value in outside)

    def _is_harmless(self, function: types.FunctionType, before: Any, store: Any) -> bool:
        """Whether an attribute is stored into the context, or into an object that is being created."""
        if before is None or "LOAD_FAST" not in before.opname:
            return False
        if store.argval in _HARMLESS_ATTRIBUTES:
            return True
        target = before.argval
        if isinstance(target, tuple):  # two loads in one instruction
            target = target[-1]
        is_first = target == function.__code__.co_varnames[0]
        return is_first and (id(function) in self._own or function.__name__ == "__init__")


def _functions_of(node: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a node's class, if the script defines it."""
    kind = getattr(type(node), "_forward_cls", None)  # private; the class of a function that is written in Python
    if kind is None:
        return
    if is_library_class(kind):
        backward = getattr(kind, "backward", None)
        for cell in getattr(backward, "__closure__", None) or ():
            registered = getattr(cell.cell_contents, "_backward_fn", None)  # private; torch.library.register_autograd
            if isinstance(registered, types.FunctionType) and not is_library_function(registered):
                yield registered
        return
    for base in kind.__mro__:
        if not is_library_class(base):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    yield inspect.unwrap(function)  # of once_differentiable


def _shared_values(node: Any) -> list[Any]:
    """Return objects in the attributes of a context that something else holds too."""
    attributes = getattr(node, "__dict__", {})
    probe = {"": object()}
    alone = sys.getrefcount(probe[""])
    return [
        attributes[name]
        for name in attributes
        if sys.getrefcount(attributes[name]) > alone and not isinstance(attributes[name], _VALUES)
    ]


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _named_items(value: Any, names: set[str]) -> list[Any]:
    """Return the named attributes of a class or Python module of the script."""
    if not isinstance(value, type | types.ModuleType) or (isinstance(value, type) and is_library_class(value)):
        return []
    if isinstance(value, types.ModuleType) and is_library_module(value):
        return []
    return [vars(value)[name] for name in names & vars(value).keys()]


def _advances(value: Any) -> bool:
    return isinstance(value, _GENERATORS) or hasattr(type(value), "__next__")


def _is_mutable(value: Any) -> bool:
    if isinstance(value, _CODE):
        return False
    return isinstance(value, (*_MUTABLE, *_FOREIGN)) or not is_library_class(type(value))
