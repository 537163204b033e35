"""State that a call of a module changes, saved before a divided call so that it can be computed again whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch import nn

from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.rng import generator_state
from samestep.view.kinds import Written
from samestep.view.slots import ModuleState


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
        self._attributes = [(index, ModuleState(parts[index], alone=True)) for index in written.attributes]
        # Tensors that are written in place, as a counter that is no buffer.
        self._tensors = [
            (index, tensor, tensor.detach().clone()) for index, state in self._attributes for tensor in state.tensors()
        ]
        self._restore_generators = generators(device, python=written.uses_python, numpy_too=written.uses_numpy)
        self._generators: tuple[object, ...] = ()
        if written.uses_python and written.uses_numpy:
            self._generators = generator_state()

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
        for _, state in self._attributes:
            state.restore()
        self._restore_generators()

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
        attributes = {index for index, state in self._attributes if state.has_changed()}
        attributes |= {index for index, tensor, value in self._tensors if not torch.equal(tensor, value)}
        generators_now = generator_state()
        return Written(
            tuple(buffers),
            tuple(sorted(attributes)),
            uses_python=self._generators[:1] != generators_now[:1],
            uses_numpy=self._generators[1:6] != generators_now[1:6],
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
