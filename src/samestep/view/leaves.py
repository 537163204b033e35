"""Leaves of the outputs of a call: those of torch's trees, and the attributes of plain objects among them."""

from __future__ import annotations

import copyreg
import gc
import types
import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn

# Private; opens classes registered with torch.
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten

VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    torch.device,
    numpy.generic,
    Enum,
)
_KNOWN = (torch.Tensor, *VALUES)
_CLOSED = (
    nn.Module,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
_NEW = (object.__new__, dict.__new__, types.SimpleNamespace.__new__)
_newobj: Any = copyreg.__newobj__  # type: ignore[attr-defined]


@dataclass
class _Opened:
    """Object among the leaves of a tree, as its class and content."""

    kind: type
    content: Any


register_pytree_node(
    _Opened,
    lambda opened: ([opened.content], opened.kind),
    lambda content, kind: _rebuilt(kind, *next(iter(content))),
)


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of a value; `tree_unflatten` makes new objects without `__init__`.

    Objects that have only attributes are opened: dataclasses, namespaces, distributions, caches.
    Other objects are leaves, and so is an object that stands in several places.
    """
    return tree_flatten(_opened(value, []), is_leaf=_is_size)


def is_held_elsewhere(value: Any) -> bool:
    """Whether something else than the value holds an object in it that `flatten` opens."""
    objects: list[Any] = []
    _opened(value, objects)
    if not objects:
        return False
    if any(weakref.getweakrefcount(item) for item in objects):
        return True
    inside = {id(objects), *(id(item) for item in _containers_below(value))}
    for holder in gc.get_referrers(*objects):
        if id(holder) not in inside and not isinstance(holder, types.FrameType):
            return True
    return False


def below(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in containers and attributes of objects, without those of modules and code."""
    items = [held for item in _containers_below(value) for held in (item, *_held_by(item))]
    return list(
        {id(tensor): tensor for tensor in items if isinstance(tensor, torch.Tensor)}.values()
    )


def _containers_below(value: Any) -> list[Any]:
    """Return a value and its parts, without tensors and code."""
    collected = [value]
    seen = {id(value)}
    for item in collected:
        for held in _held_by(item):
            if id(held) not in seen and not isinstance(held, (*_KNOWN, *_CLOSED)):
                seen.add(id(held))
                collected.append(held)
    return collected


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (*_KNOWN, *_CLOSED)):
        return []
    return gc.get_referents(value)


def _opened(value: Any, objects: list[Any]) -> Any:
    """Return a tree with objects opened, and add them to `objects`."""
    leaves, tree = tree_flatten(value, is_leaf=_is_size)  # which torch would make a tuple
    if all(isinstance(leaf, _KNOWN) for leaf in leaves):
        return value
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, _KNOWN) or any(leaf is other for other in objects):
            continue
        content = _content(leaf)
        if content is not None:
            if not isinstance(leaf, torch.Size):
                objects.append(leaf)
            leaves[position] = _Opened(type(leaf), _opened(content, objects))
    return tree_unflatten(leaves, tree)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def _content(value: Any) -> tuple[Any, dict[Any, Any]] | None:
    """Return the attributes and the items of an object; None if it may have more than these."""
    kind: Any = type(value)
    if kind is torch.Size:
        return tuple(value), {}
    has_end = isinstance(value, _CLOSED) or hasattr(kind, "__del__")
    loses_state = kind.__getstate__ is not object.__getstate__ and not hasattr(kind, "__setstate__")
    if has_end or loses_state or kind.__new__ not in _NEW:
        return None
    try:
        create, arguments, state, items, pairs = (*object.__reduce_ex__(value, 4), None, None)[:5]
    except Exception:  # boundary: objects with a hidden state, whose reducers may raise anything
        return None
    if items is None and arguments in ((kind,), ()) and create in (_newobj, kind):
        return state, dict(pairs or ())
    return None


def _rebuilt(kind: Any, state: Any, items: dict[Any, Any]) -> Any:
    if kind is torch.Size:
        return torch.Size(state)
    new: Any = kind.__new__(kind)
    if isinstance(new, dict):
        dict.update(new, items)
    if hasattr(kind, "__setstate__"):
        new.__setstate__(state)
        return new
    parts = state if isinstance(state, tuple) else (state,)  # of a dictionary, and of slots
    for part in parts:
        for name, value in (part or {}).items():
            object.__setattr__(new, name, value)  # also of frozen dataclasses
    return new
