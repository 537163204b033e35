"""Leaves of the outputs of a call: those of torch's trees, and the attributes of plain objects among them."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # private; opens classes registered with torch

VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, numpy.generic, Enum)
_KNOWN = (torch.Tensor, *VALUES)
_CLOSED = (nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_POINTER = tuple.__itemsize__


class _Plain:
    """Class of objects that have attributes, and nothing beside them."""


@dataclass(frozen=True)
class Opened:
    """Object among the leaves of a tree.

    Attributes:
        kind: its class.
        content: structure of its attributes.
        size: number of its leaves.
    """

    kind: type
    content: Spec
    size: int


@dataclass(frozen=True)
class Spec:
    """Structure of a value.

    Attributes:
        tree: structure that torch knows.
        opened: positions of objects among its leaves.
    """

    tree: TreeSpec
    opened: tuple[tuple[int, Opened], ...] = ()


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """Return the leaves and the structure of a value.

    Objects that have only attributes are opened: dataclasses, namespaces, distributions, caches. Other objects are
    leaves, and so is an object that stands in several places.
    """
    return _flatten(value, [])


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Return a value of a structure. Objects are new ones of the same classes, made without `__init__`."""
    if not spec.opened:
        return tree_unflatten(list(leaves), spec.tree)
    opened = dict(spec.opened)
    items: list[Any] = []
    start = 0
    for position in range(spec.tree.num_leaves):
        entry = opened.get(position)
        if entry is None:
            items.append(leaves[start])
            start += 1
        else:
            content = unflatten(leaves[start : start + entry.size], entry.content)
            items.append(_rebuilt(entry.kind, content))
            start += entry.size
    return tree_unflatten(items, spec.tree)


def is_held_elsewhere(value: Any) -> bool:
    """Whether something else than the value holds an object in it that `flatten` opens."""
    objects: list[Any] = []
    _flatten(value, objects)
    if not objects:
        return False
    if any(weakref.getweakrefcount(item) for item in objects):
        return True
    inside = {id(objects), *(id(item) for item in _below(value))}
    for holder in gc.get_referrers(*objects):
        if id(holder) not in inside and not isinstance(holder, types.FrameType):
            return True
    return False


def _flatten(value: Any, objects: list[Any]) -> tuple[list[Any], Spec]:
    leaves, tree = tree_flatten(value, is_leaf=_is_size)  # which torch would make a tuple
    if all(isinstance(leaf, _KNOWN) for leaf in leaves):
        return leaves, Spec(tree)
    collected: list[Any] = []
    opened: list[tuple[int, Opened]] = []
    for position, leaf in enumerate(leaves):
        content = None
        if not isinstance(leaf, _KNOWN) and not any(leaf is other for other in objects):
            content = _content(leaf)
        if content is None:
            collected.append(leaf)
            continue
        if not isinstance(leaf, torch.Size):
            objects.append(leaf)
        inner, spec = _flatten(content, objects)
        collected += inner
        opened.append((position, Opened(type(leaf), spec, len(inner))))
    return collected, Spec(tree, tuple(opened))


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def _content(value: Any) -> Any:
    """Return the parts of an object; None if it may have more than attributes."""
    kind = type(value)
    new: Any = kind.__new__
    attributes = getattr(value, "__dict__", None)
    content: Any = None
    if kind is torch.Size:
        content = tuple(value)
    elif kind is types.SimpleNamespace:
        content = dict(attributes or {})
    elif isinstance(value, dict):
        if new is dict.__new__ and kind.__basicsize__ <= dict.__basicsize__ + 2 * _POINTER:
            content = (dict(value), dict(attributes or {}))
    elif not isinstance(value, _CLOSED) and new is object.__new__ and not hasattr(kind, "__del__"):
        slots = _slots(kind)
        base = object.__basicsize__
        if attributes is not None:
            base = _Plain.__basicsize__
        if kind.__basicsize__ <= base + _POINTER * len(slots):  # larger ones have more than attributes
            content = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            content.update(attributes or {})
    return content


def _slots(kind: type) -> list[str]:
    return [
        name
        for base in kind.__mro__
        for name, entry in vars(base).items()
        if isinstance(entry, types.MemberDescriptorType)
    ]


def _rebuilt(kind: type, content: Any) -> Any:
    if kind is torch.Size:
        return torch.Size(content)
    if issubclass(kind, dict):
        items, attributes = content
        mapping: Any = dict.__new__(kind)
        dict.update(mapping, items)
        getattr(mapping, "__dict__", {}).update(attributes)
        return mapping
    new: Any = kind.__new__(kind)
    for name, value in content.items():
        object.__setattr__(new, name, value)  # also of frozen dataclasses
    return new


def _below(value: Any) -> list[Any]:
    """Return a value and its parts, without tensors and code."""
    collected = [value]
    seen = {id(value)}
    for item in collected:
        for held in gc.get_referents(item):
            if id(held) not in seen and not isinstance(held, (*_KNOWN, *_CLOSED)):
                seen.add(id(held))
                collected.append(held)
    return collected
