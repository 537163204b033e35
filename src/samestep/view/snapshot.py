"""State that a call of a module changes, saved so that the call can be computed again whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the common class of all dimensions

from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator
from samestep.distributed.rng import numpy_generator, python_generator, saved_generators
from samestep.view.leaves import hash_of, sample_of
from samestep.view.module_tensors import ModuleState

# (index of a submodule, name) of a buffer; index of a submodule, for its attributes; name of a
# generator.
Place: TypeAlias = tuple[int, str] | int | str
Written: TypeAlias = frozenset[Place]

# Those of torch may always change.
_GENERATORS = {"python": python_generator, "numpy": numpy_generator}
_LARGEST = 16 * 2**20  # bytes of a tensor that is copied in case that a later call writes into it
_STATISTICS = ("running_mean", "running_var")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic)


class _Saved:
    """A tensor and its value at one moment.

    Args:
        tensor: the tensor.
        by_version: compare only the number of writes, not the values; kernels write without
            counting.
    """

    def __init__(self, tensor: torch.Tensor, *, by_version: bool) -> None:
        self.tensor = tensor
        self._by_version = by_version
        self._value = tensor.detach().clone()
        self._version: int | None = None
        if not tensor.is_inference():  # these count no writes
            self._version = tensor._version

    def has_changed(self) -> bool:
        """Whether the tensor was written."""
        if self._version is not None and self._version != self.tensor._version:
            return True
        return not self._by_version and not torch.equal(self.tensor, self._value)

    def restore(self) -> None:
        """Put the value back."""
        # The copy would count as a write, which a graph of the script may notice.
        if self._by_version and not self.has_changed():
            return
        if self.tensor.shape != self._value.shape:  # a first forward can give a buffer its size
            self.tensor.resize_(self._value.shape)
        self.tensor.detach().copy_(self._value)
        if self._version is not None:
            # Graphs and ranks compare numbers of writes; private, in torch 2.11 and 2.13.
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self._version,))


class Snapshot:
    """State before a call: what calls of the kind change, and what the script could change.

    Args:
        parts: `submodules` of the module.
        written: places that calls of the kind change; None if no call was watched.
        device: device of the call; its generator is saved too.
    """

    def __init__(
        self, parts: Sequence[nn.Module], written: Written | None, device: torch.device
    ) -> None:
        self._parts = parts
        self._written = written or frozenset()
        self._is_first = written is None
        self._device = device
        self._buffers: list[tuple[tuple[int, str], _Saved]] = []
        self._attributes: list[tuple[int, ModuleState, list[_Saved]]] = []
        for index, part in enumerate(parts):
            is_own = self._is_first or not _is_of_torch(part)
            for name, buffer in part._buffers.items():
                place = (index, name)
                if buffer is not None and (is_own or place in self._written):
                    for saved in self._saved(place, [buffer]):
                        self._buffers.append((place, saved))
            if is_own or index in self._written:
                state = ModuleState(part, alone=True)
                # With tensors that are written in place, as a counter that is no buffer.
                self._attributes.append((index, state, self._saved(index, state.tensors())))
        self._generators = {name: state() for name, state in _GENERATORS.items()}
        self._restore_generators = saved_generators(device)

    def _saved(self, place: Place, tensors: Iterable[torch.Tensor]) -> list[_Saved]:
        """Return the values of the tensors of a place, without large ones that no call writes."""
        is_written = self._is_first or place in self._written
        return [
            _Saved(tensor, by_version=not is_written)
            for tensor in tensors
            if not nn.parameter.is_lazy(tensor)
            if is_written or (tensor.layout is torch.strided and tensor.nbytes <= _LARGEST)
        ]

    def restore(self) -> None:
        """Put the state back."""
        with torch.no_grad():
            for (index, name), saved in self._buffers:
                saved.restore()
                # A forward can also assign another tensor.
                self._parts[index]._buffers[name] = saved.tensor
            for _, state, tensors in self._attributes:
                for saved in tensors:
                    saved.restore()
                state.restore()
        self._restore_generators()

    def forget_unwritten(self) -> None:
        """Keep the places that calls of the kind change."""
        self._buffers = [entry for entry in self._buffers if entry[0] in self._written]
        self._attributes = [entry for entry in self._attributes if entry[0] in self._written]

    def buffers_of_slice(self, *, copied: bool) -> BuffersOfSlice:
        """Return the buffers that a slice writes, or copies of them, without `shared_statistics`.

        Args:
            copied: whether to copy the buffers.
        """
        own = [(place, saved.tensor) for place, saved in self._buffers if place in self._written]
        own = [(place, tensor) for place, tensor in own if not self._is_statistic(place)]
        tensors = [tensor for _, tensor in own]
        if copied:
            tensors = _copies(tensors)
        tables = [(self._parts[index]._buffers, name) for (index, name), _ in own]
        return BuffersOfSlice(
            [(*table, tensor) for table, tensor in zip(tables, tensors, strict=True)]
        )

    def shared_statistics(self) -> frozenset[int]:
        """Return the identities of running statistics that all slices share, which are equal."""
        return frozenset(
            id(saved.tensor) for place, saved in self._buffers if self._is_statistic(place)
        )

    def _is_statistic(self, place: tuple[int, str]) -> bool:
        """Whether only batch norm of torch writes into a buffer, where it knows all slices."""
        index, name = place
        part = self._parts[index]
        return isinstance(part, _BatchNorm) and _is_of_torch(part) and name in _STATISTICS

    def changes(self) -> Written:
        """Return the places that have changed since, besides those of which it is known."""
        changed: set[Place] = set()
        for place, saved in self._buffers:
            if place not in self._written:
                index, name = place
                if self._parts[index]._buffers.get(name) is not saved.tensor or saved.has_changed():
                    changed.add(place)
        for index, state, tensors in self._attributes:
            if index not in self._written and (
                state.has_changed() or any(saved.has_changed() for saved in tensors)
            ):
                changed.add(index)
        for generator, before in self._generators.items():
            if generator not in self._written and _GENERATORS[generator]() != before:
                changed.add(generator)
        return frozenset(changed)

    def values(self) -> list[Any]:
        """Return the values that the call has written and the states of its generators.

        They are equal in all slices if the state after the call is that of a whole call.
        """
        values: list[Any] = []
        tensors = []
        for index, state, inside in self._attributes:
            if index in self._written:
                values += [_value(item) for item in state.changed_items()]
                tensors += inside
        for (index, name), saved in self._buffers:
            if (index, name) in self._written and not _is_of_torch(self._parts[index]):
                tensors.append(saved)
        for saved in tensors:
            # The comparison would wait for an accelerator.
            if not is_accelerator(saved.tensor.device) and saved.has_changed():
                values.append(_value(saved.tensor))
        return values + [state() for name, state in _GENERATORS.items() if name in self._written]


class BuffersOfSlice:
    """Buffers of one of several slices that take turns: each begins with those before the call.

    Args:
        buffers: (table, name, buffer) of the slice.
    """

    def __init__(
        self, buffers: Sequence[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]]
    ) -> None:
        self._buffers = buffers

    def install(self) -> None:
        """Put the buffers into the module."""
        for table, name, buffer in self._buffers:
            table[name] = buffer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the buffers into the module during the block, and keep those at its end."""
        before = [table[name] for table, name, _ in self._buffers]
        self.install()
        try:
            yield
        finally:
            self._buffers = [(table, name, table[name]) for table, name, _ in self._buffers]
            for (table, name, _), buffer in zip(self._buffers, before, strict=True):
                table[name] = buffer


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors, made with one kernel for each dtype on a GPU."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, [tensor.detach() for tensor in tensors])
    return copies


def _is_of_torch(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.")


def _value(item: Any) -> Any:
    """Return a value with the same text in all processes; for other objects only their type."""
    if isinstance(item, _PLAIN):
        return item
    if type(item) is torch.Tensor:
        sample = sample_of(item)
        return (*item.shape, None if sample is None else hash_of(device_reads.copy(sample)))
    if isinstance(item, dict | list | tuple | set | deque):
        return type(item).__name__, len(item)
    return type(item).__name__
