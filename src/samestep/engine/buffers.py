"""Buffers of a model: their mean over microbatches, and checks of what a forward writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import Strategy

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_LISTED = 5
_FACTOR, _HASH_BITS = 6364136223846793005, 52  # float64 holds integers of 53 bits


class MicrobatchBuffers:
    """Buffers of a model whose mean over microbatches ends a step of a pipeline.

    These are persistent buffers of floating-point type, and counters: integers of one element, whose mean over equal
    values is exact. Masks and tables are left alone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._locations = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and _is_averaged(buffer)
        }
        self.names = list(self._locations)
        self._start: list[torch.Tensor] = []
        self._end = torch.empty(0)
        self.length = sum(buffer.numel() for buffer in self._current())

    def begin(self, microbatches: int = 1) -> None:
        """Copy the buffers at the beginning of a step."""
        self._start = [buffer.clone() for buffer in self._current()]

    def restore(self) -> None:
        """Set the buffers to their values at the beginning of the step."""
        copy_tensors(self._current(), self._start)

    def read(self) -> torch.Tensor:
        """Return all buffers as one float64 vector of `length` elements."""
        current = self._current()
        if not current:
            return torch.empty(0, dtype=torch.float64)
        return torch.cat([buffer.detach().reshape(-1).double().to(current[0].device) for buffer in current])

    def write(self, vector: torch.Tensor) -> None:
        """Set the buffers from a vector as returned by `read`."""
        current = self._current()
        parts = zip(vector.split([buffer.numel() for buffer in current]), current, strict=True)
        copy_tensors(current, [values.view_as(buffer) for values, buffer in parts])

    def combine(self, total: torch.Tensor, tree: MicrobatchTree, strategy: Strategy, world: World) -> None:
        """Compute the values at the end of the step from the sum of the vectors of all microbatches."""
        self._end = total / len(tree.filled)

    def commit(self) -> None:
        """Set the buffers to the values at the end of the step."""
        self.write(self._end)

    def _current(self) -> list[torch.Tensor]:
        # Looked up by name each time: a module may replace a buffer by a new tensor.
        return [getattr(module, name) for module, name in self._locations.values()]


def copy_tensors(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values` to `to`; torch's function raises on empty lists."""
    if to:
        torch._foreach_copy_(to, values)


def _is_averaged(buffer: torch.Tensor) -> bool:
    is_counter = buffer.numel() == 1 and not buffer.is_complex() and buffer.dtype != torch.bool
    return buffer.is_floating_point() or is_counter


class ParameterCheck:
    """Detects parameters that a forward writes.

    Writes are detected by the versions and addresses of parameters. A write through `.data` changes neither; with
    `digests`, hashes of all values are compared too.
    """

    def __init__(self, model: torch.nn.Module | None, ignored: Iterable[str] = ()) -> None:
        named = {} if model is None else dict(model.named_parameters())
        # Parameters that are divided among ranks change while they are gathered.
        is_whole = all(type(parameter.data) is torch.Tensor and not parameter.is_meta for parameter in named.values())
        ignored = set(ignored)
        self._parameters = {name: p for name, p in named.items() if name not in ignored} if is_whole else {}

    def begin(self, *, digests: bool = False) -> None:
        """Record all parameters."""
        parameters = self._parameters.values()
        self._versions = [parameter._version for parameter in parameters]
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._digests = self._read_digests() if digests else []

    def written(self, replica: torch.nn.Module | None = None) -> list[str]:
        """Return the names of parameters that have changed since `begin`, also in a replica of the model."""
        parameters = self._parameters.values()
        versions, addresses = [p._version for p in parameters], [p.data_ptr() for p in parameters]
        digests = self._read_digests() if self._digests else []
        if replica is not None and self._parameters:
            copies = dict(replica.named_parameters())
            for number, (name, parameter) in enumerate(self._parameters.items()):
                if copies[name].device == parameter.device:
                    addresses[number] = copies[name].data_ptr()
        if (versions, addresses, digests) == (self._versions, self._addresses, self._digests):
            return []
        now = zip(versions, addresses, digests or versions, strict=True)
        before = zip(self._versions, self._addresses, self._digests or self._versions, strict=True)
        return [name for name, new, old in zip(self._parameters, now, before, strict=True) if new != old]

    def _read_digests(self) -> list[int]:
        if not self._parameters:
            return []
        sums = [bits_of(parameter.detach()).sum(dtype=torch.int64) for parameter in self._parameters.values()]
        return [int(total) for total in torch.stack([total.to(sums[0].device) for total in sums]).tolist()]


class EvaluationState:
    """Buffers and parameters of a model, which an evaluation leaves unchanged.

    Attributes:
        written: names of parameters that changed inside the block.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [
            (module._buffers, key, buffer, buffer.clone())
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._parameters = ParameterCheck(model)
        self._parameters.begin()
        self.written: list[str] = []

    def __enter__(self) -> EvaluationState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.written = self._parameters.written()

    def restore(self) -> None:
        """Set all buffers to their values before the evaluation."""
        for table, key, buffer, _ in self._buffers:
            table[key] = buffer
        copy_tensors([buffer for _, _, buffer, _ in self._buffers], [values for *_, values in self._buffers])


def written_in_evaluation_error(names: Sequence[str]) -> InputError:
    """Return the error of an evaluation that changes parameters."""
    return InputError(
        f"the forward of an evaluation changed {listed([f'parameter {name}' for name in names])}",
        expected="an evaluation writes no parameters: the order of microbatches would decide the result",
        fix="write parameters in the loop; nn.Embedding(max_norm=...) writes in every forward",
        code="E_BUFFER",
    )


def listed(names: Sequence[str]) -> str:
    """Return some names as text."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as integers."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTEGERS[real.element_size()])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a float64 vector; complex elements as two."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).double()


def size_of(tensor: torch.Tensor) -> int:
    """Return the length of `flat(tensor)`."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as a vector of bytes."""
    return bits_of(tensor).reshape(-1).view(torch.uint8)


def hash_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an integer of `_HASH_BITS` bits that depends on all bits of some tensors."""
    data = torch.cat([bytes_of(tensor).to(tensors[0].device) for tensor in tensors])
    total: torch.Tensor = (data.long() * _weights(len(data), data.device)).sum() & (2**_HASH_BITS - 1)
    return total


@cache
def _weights(length: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, length + 1, device=device) * _FACTOR) | 1
