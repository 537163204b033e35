"""State that a call of a module changes, saved before a divided call so that it can be computed again whole."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.view.kinds import Written

_MUTABLE = (list, dict, set, deque)
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if name not in _TABLES}


def _containers(part: nn.Module) -> list[tuple[Any, Any]]:
    """Return the containers in the attributes of a module, at all levels, each with a copy."""
    collected: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    todo = [value for name, value in _attributes(part).items() if not name.endswith("_hooks")]
    while todo:
        value = todo.pop()
        if not isinstance(value, (*_MUTABLE, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            collected.append((value, dict(value)))
            todo += value.values()
            continue
        if not isinstance(value, tuple):
            collected.append((value, set(value) if isinstance(value, set) else list(value)))
        todo += value
    return collected


def _tensors(part: nn.Module) -> list[torch.Tensor]:
    """Return the tensors among the attributes of a module and in their containers, without a graph."""
    collected: list[torch.Tensor] = []
    for name, value in part.__dict__.items():
        if name in _TABLES or name.endswith("_hooks"):
            continue
        items = [value]
        if isinstance(value, dict):
            items = list(value.values())
        elif isinstance(value, list | tuple):
            items = list(value)
        collected += [item for item in items if type(item) is torch.Tensor and not item.requires_grad]
    return collected


class Snapshot:
    """State before a call.

    Args:
        parts: `submodules` of the module.
        written: changes by calls of the kind.
        device: device of the call; its generator is saved too.
    """

    def __init__(self, parts: Sequence[nn.Module], written: Written, device: torch.device) -> None:
        self._parts = parts
        self._written = written
        self._device = device
        self._buffers = []
        for index, name in written.buffers:
            buffer = parts[index]._buffers[name]
            if buffer is not None and not nn.parameter.is_lazy(buffer):
                version = None if buffer.is_inference() else buffer._version
                self._buffers.append((index, name, buffer, buffer.detach().clone(), version))
        self._attributes = [(index, _attributes(parts[index])) for index in written.attributes]
        self._containers = []
        self._tensors = []  # written in place, as a counter that is no buffer
        for index in written.attributes:
            self._containers += [(index, *pair) for pair in _containers(parts[index])]
            self._tensors += [(index, tensor, tensor.detach().clone()) for tensor in _tensors(parts[index])]
        self._torch = torch.get_rng_state()
        self._gpu = None
        if is_accelerator(device):
            self._gpu = accelerator_module().get_rng_state(device)
        self._python = None
        if written.uses_python:
            self._python = random.getstate()
        self._numpy = None
        if written.uses_numpy:
            self._numpy = numpy.random.get_state()

    @property
    def has_buffers(self) -> bool:
        """Whether the call changes buffers."""
        return bool(self._buffers)

    @contextmanager
    def revisited(self) -> Iterator[None]:
        """Put the state back during the block."""
        now = Snapshot(self._parts, self._written, self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Put the state back."""
        with torch.no_grad():
            for index, name, buffer, value, version in self._buffers:
                buffer.copy_(value)
                if version is not None:  # ranks compare numbers of writes; private, in torch 2.11 and 2.13
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
                self._parts[index]._buffers[name] = buffer
            for _, tensor, value in self._tensors:
                tensor.detach().copy_(value)
        for index, attributes in self._attributes:
            current = self._parts[index].__dict__
            for name in [name for name in current if name not in _TABLES and name not in attributes]:
                del current[name]
            current.update(attributes)
        for _, container, content in self._containers:  # the script's own objects
            container.clear()
            if isinstance(container, dict | set):
                container.update(content)
            else:
                container.extend(content)
        torch.set_rng_state(self._torch)
        if self._gpu is not None:
            accelerator_module().set_rng_state(self._gpu, self._device)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            numpy.random.set_state(self._numpy)

    def buffers_of_slice(self, *, copied: bool) -> BuffersOfSlice:
        """Return the buffers that a slice writes: those of the module, or copies."""
        places = [(self._parts[index]._buffers, name) for index, name, *_ in self._buffers]
        buffers = [buffer.detach().clone() if copied else buffer for _, _, buffer, *_ in self._buffers]
        return BuffersOfSlice(places, buffers)

    def changes(self) -> Written:
        """Return the changes since this snapshot of everything."""
        buffers = []
        for index, name, buffer, value, version in self._buffers:
            now = self._parts[index]._buffers.get(name)
            # By value too: kernels write without a new version.
            if now is not buffer or not torch.equal(buffer, value) or version not in (None, buffer._version):
                buffers.append((index, name))
        attributes = {index for index, before in self._attributes if _differ(before, self._parts[index].__dict__)}
        attributes |= {index for index, container, content in self._containers if _has_changed(container, content)}
        attributes |= {index for index, tensor, value in self._tensors if not torch.equal(tensor, value)}
        return Written(
            tuple(buffers),
            tuple(sorted(attributes)),
            uses_python=random.getstate() != self._python,
            uses_numpy=self._numpy is None or _comparable(numpy.random.get_state()) != _comparable(self._numpy),
        )


class BuffersOfSlice:
    """Buffers of one of several slices that take turns, each of which writes its own.

    Args:
        places: dictionaries and names.
        buffers: the buffers.
    """

    def __init__(
        self, places: Sequence[tuple[dict[str, torch.Tensor | None], str]], buffers: Sequence[torch.Tensor | None]
    ) -> None:
        self._places = places
        self._buffers = list(buffers)

    def install(self) -> None:
        """Put the buffers into the module."""
        for (table, name), buffer in zip(self._places, self._buffers, strict=True):
            table[name] = buffer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the buffers into the module during the block."""
        before = [table[name] for table, name in self._places]
        self.install()
        try:
            yield
        finally:
            self._buffers = [table[name] for table, name in self._places]
            for (table, name), buffer in zip(self._places, before, strict=True):
                table[name] = buffer


def everything(parts: Sequence[nn.Module]) -> Written:
    """Return the possible changes by a call of unknown code."""
    buffers = [(index, name) for index, part in enumerate(parts) for name in part._buffers.keys()]  # noqa: SIM118
    return Written(tuple(buffers), tuple(range(len(parts))), uses_python=True, uses_numpy=True)


def _comparable(state: Any) -> tuple[Any, ...]:
    """Return a state of NumPy's generator with bytes in place of an array."""
    kind, key, *others = state
    return kind, bytes(memoryview(key)), *others


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    names = {name for name in after if name not in _TABLES}
    if names != before.keys():
        return True
    return any(after[name] is not value for name, value in before.items())


def _has_changed(container: Any, before: Any) -> bool:
    """Whether a container has other items than its copy."""
    if len(container) != len(before):
        return True
    if isinstance(container, set):
        return bool(container != before)
    if isinstance(container, dict) and any(
        a is not b for a, b in zip(before.values(), container.values(), strict=True)
    ):
        return True
    return any(a is not b for a, b in zip(before, container, strict=True))
