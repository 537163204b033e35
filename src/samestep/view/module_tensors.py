"""Places in a module that hold its tensors, so that others can stand there during a call."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from operator import is_
from typing import Any

import torch
from torch import nn

# Containers with items that can be replaced and restored.
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
_MUTABLE = (dict, list, set, deque)
_WALKED = (nn.Module, dict, list, set, deque, tuple)
TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)


def containers(module: nn.Module, *, hooks: bool = False, alone: bool = False) -> list[Container]:
    """Return the dictionaries of a module and those below, and the containers in attributes.

    Modules that are held by lists, dictionaries or tuples of attributes belong to it.

    Args:
        module: the module.
        hooks: whether to return the dictionaries of hooks, too; most modules have a dozen of empty
            ones.
        alone: whether to leave out other modules, and the dictionaries of parameters, buffers and
            submodules.
    """
    collected: list[Container] = []
    seen: set[int] = set()
    skipped: frozenset[str] = frozenset()
    followed: tuple[type, ...] = _WALKED
    if alone:
        skipped = TABLES
        followed = _WALKED[1:]
    if not hooks:
        skipped |= _HOOKS
    todo: list[Any] = [module]
    while todo:
        value = todo.pop()
        items: Any = None
        if isinstance(value, nn.Module):
            value = value.__dict__
            items = [item for name, item in value.items() if name not in skipped]
        # Modules and containers can refer to each other in cycles.
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _MUTABLE):
            collected.append(value)
        if items is None:
            items = value.values() if isinstance(value, dict) else value
        todo.extend(item for item in items if isinstance(item, followed))
    return collected


class ModuleState:
    """Attributes of a module at one moment, with the items of containers, by reference.

    The arguments are those of `containers`.

    Attributes:
        contents: the containers with their items: dictionaries with copies, others with lists.
    """

    def __init__(self, module: nn.Module, *, hooks: bool = False, alone: bool = False) -> None:
        self.contents = _with_copies(containers(module, hooks=hooks, alone=alone))

    def again(self) -> ModuleState:
        """Return the present state of the same containers."""
        state = copy(self)
        state.contents = _with_copies([container for container, _ in self.contents])
        return state

    def tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors without a graph among the attributes and items, each once."""
        items = (item for _, content in self.contents for item in _items(content))
        tensors = {
            id(item): item
            for item in items
            if type(item) is torch.Tensor and not item.requires_grad
        }
        return list(tensors.values())

    def has_changed(self) -> bool:
        """Whether an attribute or item has been added, removed or replaced."""
        return any(_differ(container, content) for container, content in self.contents)

    def changed_items(self) -> Iterator[Any]:
        """Yield the number of each changed container, and its items that were not there before."""
        for number, (container, content) in enumerate(self.contents):
            if not _differ(container, content):
                continue
            yield number
            yield len(container)
            before = {id(item) for item in _items(content)}
            yield from (item for item in _items(container) if id(item) not in before)

    def restore(self) -> None:
        """Put the attributes and items back; containers keep their identity."""
        for container, content in self.contents:
            if not _differ(container, content):
                continue
            container.clear()
            if isinstance(container, dict | set):
                container.update(content)
            else:
                container.extend(content)


def _with_copies(containers: Sequence[Container]) -> list[tuple[Any, Any]]:
    return [(one, dict(one) if isinstance(one, dict) else list(one)) for one in containers]


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _differ(container: Any, content: Any) -> bool:
    # By identity: the comparison of two tensors is a tensor.
    if len(container) != len(content) or not all(map(is_, container, content)):
        return True
    return isinstance(container, dict) and not all(map(is_, container.values(), content.values()))


# Container, key, value, and its replacement during a block.
Entry = tuple[Any, Any, Any, Any]


@contextmanager
def replaced(entries: Sequence[Entry]) -> Iterator[None]:
    """Put replacements in their places during the block. A place that is assigned keeps that."""
    # In a backward, others than the values can stand there, as those of `functional_call`.
    before = [_present(container, key, value) for container, key, value, _ in entries]
    for container, key, _, replacement in entries:
        container[key] = replacement
    try:
        yield
    finally:
        for (container, key, _, replacement), value in zip(entries, before, strict=True):
            if _present(container, key, None) is replacement:
                container[key] = value


def _present(container: Any, key: Any, absent: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError):  # deleted
        return absent


def is_in_place(entries: Sequence[Entry]) -> bool:
    """Whether each place holds its value."""
    try:
        return all(container[key] is value for container, key, value, _ in entries)
    except (KeyError, IndexError):  # deleted
        return False


class ParameterSlots:
    """Slots of a module's parameters and buffers: in tables, attributes and containers.

    A tensor that is used in several places (tied weights, `_flat_weights` of recurrent layers and
    the weak references next to them) has several slots. Slots are collected once; they hold until a
    parameter or buffer is assigned.

    Attributes:
        tensors: the tensors, each once: parameters, buffers, and, with `attributes`, all others.
    """

    def __init__(self, module: nn.Module, *, attributes: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor)
        self._direct: list[tuple[Any, Any, int]] = []  # container, key, index of the tensor
        self._nested: list[tuple[Any, Any, Any]] = []  # container, key, tuple or weak reference
        for container in containers(module):
            # Items of a set have no key at which others could stand.
            if isinstance(container, set):
                continue
            entries = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in entries:
                if attributes:
                    for tensor in _tensors(value):
                        self._add(tensor)
                if id(value) in self._index:
                    self._direct.append((container, key, self._index[id(value)]))
                elif any(id(tensor) in self._index for tensor in _tensors(value)):
                    self._nested.append((container, key, value))

    def _add(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)

    def entries(self, mapping: Mapping[torch.Tensor, torch.Tensor]) -> list[Entry]:
        """Return the slots of the keys of `mapping`, with present values and replacements."""
        replacements = [mapping.get(tensor, tensor) for tensor in self.tensors]
        collected: list[Entry] = []
        for container, key, index in self._direct:
            if replacements[index] is not self.tensors[index]:
                collected.append((container, key, self.tensors[index], replacements[index]))
        for container, key, value in self._nested:
            # Others can stand there by another mapping.
            if any(tensor in mapping for tensor in _tensors(value)):
                collected.append((container, key, value, self._rebuilt(value, replacements)))
        return collected

    def _rebuilt(self, value: Any, replacements: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            index = self._index.get(id(value))
            return value if index is None else replacements[index]
        if isinstance(value, weakref.ref):
            referent = value()
            if isinstance(referent, torch.Tensor):
                return weakref.ref(self._rebuilt(referent, replacements))
            return value
        if isinstance(value, tuple):
            items = [self._rebuilt(item, replacements) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensor that `value` is or refers to, or those of a tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, weakref.ref):
        referent = value()
        if isinstance(referent, torch.Tensor):
            yield referent
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
