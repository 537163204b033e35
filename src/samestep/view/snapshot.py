"""State that a call of a module changes, saved before a divided call so that it can be computed again whole."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.view.fingerprints import hash_of, python_generator, sample_of
from samestep.view.kinds import Written
from samestep.view.slots import ModuleState

_LARGEST = 16 * 2**20  # bytes of a tensor that is copied in case that a later call writes into it
_PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic)


def generators(device: torch.device, *, python: bool = True, numpy_too: bool = True) -> Callable[[], None]:
    """Return a function that restores the present states of the generators of torch and a device.

    Args:
        device: the device.
        python: whether it restores the generator of Python.
        numpy_too: whether it restores that of NumPy.
    """
    state = random.getstate() if python else None
    array = numpy.random.get_state() if numpy_too else None
    host = torch.get_rng_state()
    gpu = accelerator_module().get_rng_state(device) if is_accelerator(device) else None

    def restore() -> None:
        if state is not None:
            random.setstate(state)
        if array is not None:
            numpy.random.set_state(array)
        torch.set_rng_state(host)
        if gpu is not None:
            accelerator_module().set_rng_state(gpu, device)

    return restore


class _Saved(NamedTuple):
    """A tensor and its value at one moment."""

    tensor: torch.Tensor
    value: torch.Tensor
    version: int | None  # None for inference tensors, which count no writes

    def has_changed(self, *, by_value: bool) -> bool:
        """Whether the tensor was written. By value too, since kernels write without a new version."""
        if self.version is not None and self.version != self.tensor._version:
            return True
        return by_value and not torch.equal(self.tensor, self.value)

    def restore(self) -> None:
        """Put the value back."""
        self.tensor.detach().copy_(self.value)
        if self.version is not None:  # graphs and ranks compare numbers of writes; private, in torch 2.11 and 2.13
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))


def _saved(tensor: torch.Tensor) -> _Saved:
    return _Saved(tensor, tensor.detach().clone(), None if tensor.is_inference() else tensor._version)


class _Others:
    """State besides buffers at one moment: attributes with the tensors in them, and generators.

    Args:
        states: attributes, with the indices of their submodules.
        written: changes by calls of the kind.
        device: device of the call.
    """

    def __init__(self, states: Sequence[tuple[int, ModuleState]], written: Written, device: torch.device) -> None:
        self.states = states
        # Tensors that are written in place, as a counter that is no buffer.
        self.tensors = [
            (index, _saved(tensor))
            for index, state in states
            for tensor in state.tensors()
            if not written.is_guess or _is_small(tensor)
        ]
        self._written = written
        self._device = device
        self._python = random.getstate() if written.uses_python else None
        self._numpy = numpy.random.get_state() if written.uses_numpy else None
        self._restore_generators = generators(device, python=False, numpy_too=False)

    def again(self) -> _Others:
        """Return the present state."""
        return _Others([(index, state.again()) for index, state in self.states], self._written, self._device)

    def restore(self) -> None:
        """Put the state back."""
        with torch.no_grad():
            for _, saved in self.tensors:
                saved.restore()
        for _, state in self.states:
            state.restore()
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            numpy.random.set_state(self._numpy)
        self._restore_generators()

    def uses_python(self) -> bool:
        """Whether Python's generator has another state now."""
        return self._python is not None and self._python != random.getstate()

    def uses_numpy(self) -> bool:
        """Whether NumPy's generator has another state now."""
        return self._numpy is not None and _comparable(self._numpy) != _comparable(numpy.random.get_state())


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
            if buffer is None or nn.parameter.is_lazy(buffer):
                continue
            if not written.is_guess or _is_small(buffer):
                self._buffers.append((index, name, _saved(buffer)))
        self.others = _Others(
            [(index, ModuleState(parts[index], alone=True)) for index in written.attributes], written, device
        )

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
            for index, name, saved in self._buffers:
                saved.restore()
                self._parts[index]._buffers[name] = saved.tensor
        self.others.restore()

    def state_of_slice(self, *, copied: bool) -> StateOfSlice:
        """Return the state that a slice writes: buffers of the module, or copies; attributes; generators."""
        places = [(self._parts[index]._buffers, name) for index, name, _ in self._buffers]
        buffers = [saved.tensor.detach().clone() if copied else saved.tensor for _, _, saved in self._buffers]
        return StateOfSlice(places, buffers, self.others)

    def changes(self, *, by_value: bool = True) -> Written:
        """Return the changes since this snapshot.

        Args:
            by_value: whether to compare values of tensors, besides their numbers of writes.
        """
        buffers = []
        for index, name, saved in self._buffers:
            if self._parts[index]._buffers.get(name) is not saved.tensor or saved.has_changed(by_value=by_value):
                buffers.append((index, name))
        attributes = {index for index, state in self.others.states if state.has_changed()}
        attributes |= {index for index, saved in self.others.tensors if saved.has_changed(by_value=by_value)}
        return Written(
            tuple(buffers),
            tuple(sorted(attributes)),
            uses_python=self.others.uses_python(),
            uses_numpy=self.others.uses_numpy(),
        )

    def has_changed(self) -> bool:
        """Whether the state has changed; values of tensors are not compared."""
        return self.changes(by_value=False) != Written()

    def values(self) -> list[Any]:
        """Return the values written by the call and the states of its generators, as values with a text.

        They are equal in all slices if the state after the call is that of a whole call.
        """
        values: list[Any] = []
        for _, state in self.others.states:
            values += [_value(item) for item in state.changed_items()]
        tensors = [saved for _, saved in self.others.tensors]
        tensors += [saved for index, _, saved in self._buffers if not _is_of_torch(self._parts[index])]
        for saved in tensors:
            if saved.has_changed(by_value=False) and not is_accelerator(saved.tensor.device):
                values.append(_value(saved.tensor))
        if self._written.uses_python:
            values.append(python_generator())
        if self._written.uses_numpy:
            values.append(zlib.crc32(repr(_comparable(numpy.random.get_state())).encode()))
        return values


class StateOfSlice:
    """State of one of several slices that take turns: each begins with the state before the call.

    Args:
        places: dictionaries and names of buffers.
        buffers: the buffers of the slice.
        others: the other state before the call.
    """

    def __init__(
        self,
        places: Sequence[tuple[dict[str, torch.Tensor | None], str]],
        buffers: Sequence[torch.Tensor | None],
        others: _Others,
    ) -> None:
        self._places = places
        self._buffers = list(buffers)
        self._others = others

    def install(self) -> None:
        """Put the state into the module and the generators."""
        for (table, name), buffer in zip(self._places, self._buffers, strict=True):
            table[name] = buffer
        self._others.restore()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the state into the module and the generators during the block, and keep that at its end."""
        before = [table[name] for table, name in self._places]
        self.install()
        try:
            yield
        finally:
            self._buffers = [table[name] for table, name in self._places]
            self._others = self._others.again()
            for (table, name), buffer in zip(self._places, before, strict=True):
                table[name] = buffer


def _is_of_torch(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.")


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= _LARGEST


def _comparable(state: Any) -> tuple[Any, ...]:
    kind, key, *others = state
    return kind, key.tobytes(), *others


def _value(item: Any) -> Any:
    """Return a value with the same text in all processes; for other objects only their type."""
    if isinstance(item, _PLAIN):
        return item
    if type(item) is torch.Tensor:
        sample = sample_of(item)
        return (*item.shape, None if sample is None else hash_of(sample.cpu()))
    if isinstance(item, dict | list | tuple | set | deque):
        return type(item).__name__, len(item)
    return type(item).__name__


def everything(parts: Sequence[nn.Module]) -> Written:
    """Return the possible changes by a call of unknown code."""
    buffers = [(index, name) for index, part in enumerate(parts) for name in part._buffers.keys()]  # noqa: SIM118
    return Written(tuple(buffers), tuple(range(len(parts))), uses_python=True, uses_numpy=True)


def unwritten(parts: Sequence[nn.Module], written: Written, device: torch.device) -> Snapshot:
    """Return the present state that code of the script could change, and which no watched call has changed."""
    indices = [index for index, part in enumerate(parts) if not _is_of_torch(part)]
    buffers = [(index, name) for index in indices for name in parts[index]._buffers]
    guess = Written(
        tuple(place for place in buffers if place not in written.buffers),
        tuple(index for index in indices if index not in written.attributes),
        uses_python=not written.uses_python,
        uses_numpy=not written.uses_numpy,
        is_guess=True,
    )
    return Snapshot(parts, guess, device)
