"""Buffers of a model: places, copies and hashes, means over microbatches, and checks of written values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch

from samestep.config.validation import match_patterns
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import Strategy

Kind = Literal["_buffers", "_parameters", "__dict__"]
Rule = Literal["mean", "equal", "last", "sum"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_LISTED = 5
UNKNOWN_VERSION = -1  # version of a value that has none
_FACTOR, _HASH_BITS = 6364136223846793005, 52  # float64 holds integers of 53 bits


@dataclass(frozen=True, eq=False)
class Place:
    """Place of a value among the buffers, parameters or attributes of a module."""

    module: torch.nn.Module
    path: str
    key: str
    kind: Kind
    rule: Rule
    is_persistent: bool = True

    def table(self, module: torch.nn.Module | None = None) -> dict[str, Any]:
        """Return the table of the module that holds the value."""
        table: dict[str, Any] = getattr(module or self.module, self.kind)
        return table

    def value(self, module: torch.nn.Module | None = None) -> Any:
        """Return the value in this module, or in a replica of it."""
        value = self.table(module).get(self.key)
        return value.data if self.kind == "_parameters" and value is not None else value

    def put(self, value: Any) -> None:
        """Set the value in this module."""
        if self.kind == "_parameters":
            self.table()[self.key].data = value
        elif self.table().get(self.key) is not value:
            self.table()[self.key] = value


class MicrobatchBuffers:
    """Buffers of a model whose mean over microbatches ends a step of a pipeline.

    These are persistent buffers of floating-point type, and counters: integers of one element, whose mean over equal
    values is exact. Masks and tables are left alone.

    Attributes:
        control_length: 0; see `ForwardState`.
    """

    control_length = 0

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

    def combine(
        self, total: torch.Tensor, control: Sequence[float], tree: MicrobatchTree, strategy: Strategy, world: World
    ) -> None:
        """Compute the values at the end of the step from the sum of the vectors of all microbatches."""
        self._end = total / len(tree.filled)

    def commit(self) -> None:
        """Set the buffers to the values at the end of the step."""
        self.write(self._end)

    def _current(self) -> list[torch.Tensor]:
        # Looked up by name each time: a module may replace a buffer by a new tensor.
        return [getattr(module, name) for module, name in self._locations.values()]


def copy_tensors(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values` to `to`.

    One call per pair of types: torch raises on empty lists, CUDA copies lists of several types one tensor at a time,
    and torch 2.10 writes all of them as the type of the first (https://github.com/pytorch/pytorch/issues/173383).
    """
    groups: dict[tuple[torch.dtype, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(to, values, strict=True):
        targets, sources = groups.setdefault((target.dtype, value.dtype), ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


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


def changed_state_error(names: Sequence[str]) -> InputError:
    """Return the error of a training forward that changes state for which there is no rule."""
    return InputError(
        f"the forward of a training step changed {listed(names)}",
        expected="a forward changes the values of buffers, not their shapes and types; it registers no buffers "
        "and writes no parameters",
        fix="write parameters after engine.step, or declare frozen ones, such as a key encoder: "
        "Engine(..., buffers={'key_encoder.*': 'last'}); register buffers with their final shape in __init__",
        code="E_BUFFER",
    )


def unequal_state_error(names: Sequence[str]) -> InputError:
    """Return the error of microbatches that end with different values of state that must be equal."""
    return InputError(
        f"microbatches of a step ended with different values of {listed(names)}",
        expected="integer and bool buffers, such as counters of steps, that are equal after every microbatch",
        fix=f'choose a rule: Engine(..., buffers={{"{names[0]}": "last"}}) for the value of the last microbatch, or '
        '"sum" for the sum of all changes',
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


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies of tensors; one kernel per type and device, for any number of tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(position)
    result = list(tensors)
    for positions in groups.values():
        joined = torch.cat([tensors[position].reshape(-1) for position in positions])
        pieces = joined.split_with_sizes([tensors[position].numel() for position in positions])
        for position, piece in zip(positions, pieces, strict=True):
            result[position] = piece.view(tensors[position].shape)
    return result


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one type as a float64 vector; complex elements as two."""
    joined = torch.cat(_rows(tensors, tensors[0].device))
    real = torch.view_as_real(joined.resolve_conj()).reshape(-1) if joined.is_complex() else joined
    return real.double()


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor in the result of `flat`."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as a vector of bytes."""
    return bits_of(tensor).reshape(-1).view(torch.uint8)


def hash_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an integer of `_HASH_BITS` bits that depends on all bits of some tensors."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    pieces = [bytes_of(torch.cat(_rows(group, tensors[0].device))) for group in groups.values()]
    data = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    total: torch.Tensor = (data.long() * _weights(len(data), data.device)).sum() & (2**_HASH_BITS - 1)
    return total


def _rows(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors as vectors on a device. Calls without an effect take more time than these conditions."""
    rows = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    return [row if row.device == device else row.to(device) for row in rows]


@cache
def _weights(length: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, length + 1, device=device) * _FACTOR) | 1


def rules_of(tensors: Mapping[str, torch.Tensor], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of each tensor that matches a pattern."""
    result: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        if rule not in get_args(Rule):
            raise InputError(
                f"the rule for {pattern!r} in buffers is {rule!r}",
                expected=f"one of {', '.join(get_args(Rule))}",
                fix=f'buffers={{"{pattern}": "last"}}',
                code="E_BUFFER",
            )
        for name in match_patterns(tensors, [pattern], key="buffers", kind="buffer", example="*.queue"):
            dtype = tensors[name].dtype
            if (rule == "mean" and not dtype.is_floating_point and not dtype.is_complex) or (
                rule == "sum" and dtype == torch.bool
            ):
                raise InputError(
                    f"the rule for {name!r} in buffers is {rule!r}, and its type is {dtype}",
                    expected="mean for floating-point and complex values, sum for these and integers",
                    fix=f'buffers={{"{name}": "last"}}',
                    code="E_BUFFER",
                )
            result[name] = rule
    return result


def is_number(value: Any) -> bool:
    """Return whether an attribute is a number that float64 holds exactly."""
    return type(value) in (bool, float) or (type(value) is int and abs(value) < 2**53)


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a value as a tensor; None for anything but tensors and numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64) if is_number(value) else None


def version_of(value: Any) -> int:
    """Return the number of writes to a tensor; `UNKNOWN_VERSION` for other values, inference tensors and parameters."""
    # The check of `torch.nn.Parameter` is slow.
    is_counted = type(value) is torch.Tensor or (
        isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    )
    return value._version if is_counted and not value.is_inference() else UNKNOWN_VERSION


def any_differs(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether some bits of tensors differ, on their device; some kernels per type, for any number of tensors."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for value, other in zip(values, others, strict=True):
        pair = groups.setdefault((value.dtype, value.device), ([], []))
        pair[0].append(value.reshape(-1))
        pair[1].append(other.reshape(-1))
    flags = [(bits_of(torch.cat(one)) != bits_of(torch.cat(other))).any() for one, other in groups.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()


def as_number(value: float, before: bool | int | float) -> bool | int | float:
    """Return a value with the type of the value before, if this holds it exactly."""
    kind = type(before)
    return kind(value) if math.isfinite(value) and kind(value) == value else value
