"""How a batch is put together from its samples: learned from parts, and used to join own rows."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import numpy
import torch

from samestep.data.batch import with_values
from samestep.distributed.device_reads import device_reads

_PLAIN = (bool, int, float, str, type(None))  # values that JSON returns as they are


@dataclass(frozen=True)
class Leaf:
    """One value of a batch that is no container.

    Attributes:
        kind: `rows`: a tensor with the rows of the samples in order; `list`: plain values of the
            samples in order; `same`: a value that does not depend on the samples.
        factor: rows of the tensor, or values, per sample.
    """

    kind: Literal["rows", "list", "same"]
    factor: int = 1


Plan = Leaf | dict[Any, Any] | list[Any]
Leaves = list[tuple[Leaf, Any]]
SMALL_BYTES = 64 * 2**10  # of a whole tensor that is gathered at once


class OtherStructure(Exception):
    """A batch is not of the structure of a plan."""


def plan_of(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Plan | None:
    """Return how a batch is put together from batches of its slices, or None if it is not.

    Args:
        whole: collated batch.
        parts: collated slices of the batch.
        sizes: number of samples of each slice.
    """
    if any(type(part) is not type(whole) for part in parts):
        return None
    plan: Plan | None = None
    if isinstance(whole, torch.Tensor):
        plan = _plan_of_tensor(whole, parts, sizes)
    elif _is_mapping(whole):
        keys = list(whole.keys())
        if all(list(part.keys()) == keys for part in parts):
            named = {key: plan_of(whole[key], [part[key] for part in parts], sizes) for key in keys}
            plan = None if None in named.values() else named
    elif isinstance(whole, list | tuple):
        if all(len(part) == len(whole) for part in parts):
            items = [
                plan_of(item, [part[at] for part in parts], sizes) for at, item in enumerate(whole)
            ]
            plan = None if None in items else items
        else:
            plan = _plan_of_list(whole, parts, sizes)
    elif all(equal(whole, part) for part in parts):
        plan = Leaf("same")
    return plan


def _plan_of_tensor(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int]
) -> Plan | None:
    # Joined rows of other tensors would lose the class, the sparsity or the history.
    if type(whole) is not torch.Tensor or whole.layout is not torch.strided or whole.requires_grad:
        return None
    samples = sum(sizes)
    if whole.dim() and whole.shape[0] and whole.shape[0] % samples == 0:
        factor = whole.shape[0] // samples
        shapes = [(size * factor, *whole.shape[1:]) for size in sizes]
        if [tuple(part.shape) for part in parts] == shapes and equal(whole, torch.cat(list(parts))):
            return Leaf("rows", factor)
    if all(equal(whole, part) for part in parts):
        return Leaf("same")
    return None


def _plan_of_list(whole: Sequence[Any], parts: Sequence[Any], sizes: Sequence[int]) -> Plan | None:
    factor, rest = divmod(len(whole), sum(sizes))
    if rest or [len(part) for part in parts] != [size * factor for size in sizes]:
        return None
    if type(whole) not in (list, tuple) or any(type(item) not in _PLAIN for item in whole):
        return None
    if equal(list(whole), [item for part in parts for item in part]):
        return Leaf("list", factor)
    return None


def _is_mapping(value: Any) -> bool:
    """Whether a value has keys, such as a dict or a batch of Transformers.

    Read the keys by `keys()`: the iteration of such a batch is another one.
    """
    return isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are equal: also tensors, arrays, and objects without an own equality."""
    own_equality: Any = type(one).__eq__
    if one is other:
        result = True
    elif type(one) is not type(other):
        result = False
    elif isinstance(one, torch.Tensor):
        result = _equal_tensors(one, other)
    elif isinstance(one, numpy.ndarray):
        result = one.dtype == other.dtype and numpy.array_equal(
            one, other, equal_nan=one.dtype.kind in "fc"
        )
    elif isinstance(one, float):
        result = one == other or (math.isnan(one) and math.isnan(other))
    elif _is_mapping(one):
        keys = list(one.keys())
        has_keys = keys == list(other.keys())
        result = has_keys and all(equal(one[key], other[key]) for key in keys)
    elif isinstance(one, list | tuple):
        result = len(one) == len(other) and all(map(equal, one, other))
    elif own_equality is object.__eq__:
        result = equal(getattr(one, "__dict__", None), getattr(other, "__dict__", None))
    else:
        result = bool(one == other)
    return result


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout is not other.layout:
        return False
    if one.is_floating_point() or one.is_complex():
        # `torch.equal` is false for NaN.
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)


def leaves_of(data: Any, plan: Plan) -> Leaves:
    """Return the leaves of a batch, in order.

    Raises:
        OtherStructure: the batch is not of the structure of the plan.
    """
    leaves: list[tuple[Leaf, Any]] = []
    rebuilt(data, plan, lambda value, leaf: leaves.append((leaf, value)))
    return leaves


def rebuilt(data: Any, plan: Plan, replace: Callable[[Any, Leaf], Any]) -> Any:
    """Return a batch with other leaves, in containers of the same types.

    Raises:
        OtherStructure: the batch is not of the structure of the plan.
    """
    if isinstance(plan, Leaf):
        return replace(data, plan)
    # Keys in order: ranks gather leaves by number.
    if isinstance(plan, dict):
        if not _is_mapping(data) or list(data.keys()) != list(plan):
            raise OtherStructure
        named = {key: rebuilt(data[key], part, replace) for key, part in plan.items()}
        return with_values(data, named)
    if not isinstance(data, list | tuple) or len(data) != len(plan):
        raise OtherStructure
    items = [rebuilt(item, part, replace) for item, part in zip(data, plan, strict=True)]
    return with_values(data, items)


def shapes_of(leaves: Sequence[tuple[Leaf, Any]], samples: int) -> int:
    """Return a hash that is equal on all ranks if the rows of their batches can be joined.

    Args:
        leaves: leaves of the own rows.
        samples: number of own samples.

    Raises:
        OtherStructure: a leaf differs from that of the plan.
    """
    facts: list[Any] = []
    for leaf, value in leaves:
        rows = samples * leaf.factor
        if leaf.kind == "rows":
            if type(value) is not torch.Tensor or not value.dim() or len(value) != rows:
                raise OtherStructure
            facts.append((str(value.dtype), tuple(value.shape[1:]), value.requires_grad))
        elif leaf.kind == "list":
            if type(value) not in (list, tuple) or len(value) != rows:
                raise OtherStructure
            if any(type(item) not in _PLAIN for item in value):
                raise OtherStructure
            facts.append(type(value).__name__)
        else:
            facts.append(content_of(value))
    # Never negative: own_rows.py sends negative numbers for failures.
    return zlib.crc32(repr(facts).encode(errors="surrogatepass"))


def content_of(value: Any) -> int:
    """Return a hash of tensors, arrays and plain values in nested data, equal in all processes."""
    facts: Any = None
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        # Flat: a tensor without dimensions has no view as bytes.
        raw = device_reads.copy(value.detach()).contiguous().reshape(-1).view(torch.uint8).numpy()
        facts = (str(value.dtype), tuple(value.shape), zlib.crc32(raw.data))
    elif isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        facts = (str(value.dtype), value.shape, zlib.crc32(numpy.ascontiguousarray(value).data))
    elif isinstance(value, numpy.ndarray):
        facts = content_of(value.tolist())
    elif isinstance(value, list | tuple):
        # At once if possible: a list can have one entry for each sample.
        is_plain = all(type(item) in _PLAIN for item in value)
        facts = (type(value).__name__, value if is_plain else list(map(content_of, value)))
    elif _is_mapping(value):
        facts = [(str(key), content_of(value[key])) for key in list(value.keys())]
    elif isinstance(value, bytes | bytearray):
        facts = bytes(value)
    elif isinstance(value, set | frozenset):
        # Sorted: the order of a set differs between processes.
        facts = sorted(content_of(item) for item in value)
    elif type(value) in _PLAIN or isinstance(value, complex | numpy.generic):
        facts = value
    elif is_dataclass(value):
        facts = (type(value).__name__, content_of(vars(value)))
    # Not `hash`, which differs between processes for text.
    return zlib.crc32(repr(facts).encode(errors="surrogatepass"))


def pack(leaves: Sequence[tuple[Leaf, Any]]) -> torch.Tensor:
    """Return leaves as bytes, shape (number of bytes,): tensors of the host, then plain values."""
    lists = [value for leaf, value in leaves if leaf.kind == "list"]
    parts = [
        value.detach().contiguous().reshape(-1).view(torch.uint8)
        for leaf, value in leaves
        if leaf.kind == "rows"
    ]
    if lists:
        # A bytearray: torch warns of memory that cannot be written.
        parts.append(torch.frombuffer(bytearray(json.dumps(lists).encode()), dtype=torch.uint8))
    if parts:
        return torch.cat(parts)
    return torch.empty(0, dtype=torch.uint8)


def unpack(
    messages: Sequence[torch.Tensor], counts: Sequence[int], examples: Sequence[tuple[Leaf, Any]]
) -> list[Any]:
    """Return the whole values of the packed leaves, those of the ranks one after another.

    Args:
        messages: bytes of each rank.
        counts: number of samples of each rank.
        examples: own leaves that were packed, tensors first.
    """
    tensors = [(leaf, value) for leaf, value in examples if leaf.kind == "rows"]
    parts: list[list[torch.Tensor]] = [[] for _ in tensors]
    texts = []
    for message, count in zip(messages, counts, strict=True):
        position = 0
        for number, (leaf, example) in enumerate(tensors):
            shape = (count * leaf.factor, *example.shape[1:])
            size = torch.Size(shape).numel() * example.element_size()
            raw = message[position : position + size].clone()  # aligned for any dtype
            parts[number].append(raw.view(example.dtype).view(shape))
            position += size
        texts.append(bytes(memoryview(message[position:].numpy())))  # type: ignore[arg-type]
    wholes: list[Any] = [torch.cat(part) for part in parts]
    if len(tensors) < len(examples):
        by_rank = [json.loads(text) for text in texts]
        for number, (_, example) in enumerate(examples[len(tensors) :]):
            wholes.append(type(example)(item for lists in by_rank for item in lists[number]))
    return wholes


def small_leaves(leaves: Leaves, rows: int) -> list[int]:
    """Return the numbers of the leaves of `rows` samples that are gathered at once.

    Tensors come first, then lists.
    """
    tensors = []
    for number, (leaf, value) in enumerate(leaves):
        if leaf.kind == "rows" and value.device.type == "cpu" and not value.requires_grad:
            bytes_per_row = value[:1].numel() * value.element_size()
            if bytes_per_row * leaf.factor * rows <= SMALL_BYTES:
                tensors.append(number)
    # The order of `pack` and `unpack`.
    return tensors + [number for number, (leaf, _) in enumerate(leaves) if leaf.kind == "list"]
