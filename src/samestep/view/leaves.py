"""Leaves of the outputs of a call, with those of plain objects, and tensors that are kept."""

from __future__ import annotations

import gc
import sys
import types
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

# Private; opens classes registered with torch.
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten

VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type, Enum),
    *(torch.dtype, torch.device, numpy.generic),
)
TensorReference = weakref.ref[torch.Tensor]
SAMPLE = 32  # values of a larger tensor that are compared
_KNOWN = (torch.Tensor, *VALUES)
_CLOSED = (
    *(nn.Module, types.ModuleType, types.FunctionType, types.MethodType),
    types.BuiltinFunctionType,
)
_COPIES = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")  # how objects are copied


@dataclass
class _Opened:
    """Object among the leaves of a tree, as its class and content."""

    kind: type
    content: Any


register_pytree_node(
    _Opened,
    lambda opened: ([opened.content], opened.kind),
    lambda content, kind: _rebuilt(kind, *content),
)


class _Plain:
    """Object with attributes alone."""


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of a value.

    `tree_unflatten` makes new objects without `__init__`. Objects that have only attributes are
    opened: dataclasses without slots, distributions, caches. Other objects are leaves, and so is an
    object that stands in several places.
    """
    return tree_flatten(_opened(value, []), is_leaf=_is_size)


def is_held_elsewhere(value: Any) -> bool:
    """Whether something else than the value holds an object in it that `flatten` opens."""
    objects: list[Any] = []
    _opened(value, objects)
    if not objects:
        return False
    # A weak reference would not follow to the object that `tree_unflatten` makes.
    if any(weakref.getweakrefcount(item) for item in objects):
        return True
    inside = {id(objects), *(id(item) for item in _containers_below(value))}
    for holder in gc.get_referrers(*objects):
        # Frames hold the object while they run, and not afterwards.
        if id(holder) not in inside and not isinstance(holder, types.FrameType):
            return True
    return False


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


def _content(value: Any) -> Any:
    """Return the attributes of an object; None if it may have more than these."""
    kind: Any = type(value)
    if kind is torch.Size:
        return tuple(value)
    # A second object would run `__del__` once more. A larger one has slots, or parts in C.
    is_closed = isinstance(value, _CLOSED) or hasattr(kind, "__del__")
    is_plain = kind.__basicsize__ == _Plain.__basicsize__ and not hasattr(kind, "__setstate__")
    if is_closed or not is_plain or not hasattr(value, "__dict__"):
        return None
    if any(getattr(kind, name) is not getattr(object, name) for name in _COPIES):
        return None
    return dict(vars(value))


def _rebuilt(kind: Any, content: Any) -> Any:
    if kind is torch.Size:
        return torch.Size(content)
    new = object.__new__(kind)
    vars(new).update(content)  # also of frozen dataclasses
    return new


# --- tensors that are kept ------------------------------------------------------------------------


def kept_elsewhere(
    module: nn.Module, leaves: Iterable[Any], made: Mapping[int, TensorReference], checkpoints: bool
) -> str | None:
    """Return a reason if tensors that a call made are kept by other ways than its outputs.

    Args:
        module: the module that was called.
        leaves: leaves of the arguments and outputs.
        made: tensors that the call made, by identity.
        checkpoints: parts are computed again in the backward.
    """
    known = {id(leaf) for leaf in (*leaves, *module.parameters())}
    unknown = {number: reference for number, reference in made.items() if number not in known}
    if not _held(unknown.values()):
        return None
    reason = _kept_by_module(module, unknown)
    # Checkpoints keep the inputs of their parts.
    if reason is not None or checkpoints or not _held(unknown.values()):
        return reason
    gc.collect()  # tensors in cycles of objects
    if all(_is_held_by_graph(reference) for reference in _held(unknown.values())):
        return None
    return "keeps a tensor of the call outside of the module"


def _kept_by_module(module: nn.Module, made: dict[int, TensorReference]) -> str | None:
    """Return a reason if attributes keep tensors with a graph; take others out of `made`."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            for tensor in _tensors_below(value):
                reference = made.get(id(tensor))
                if reference is None or reference() is not tensor:
                    continue
                if tensor.grad_fn is not None:
                    return f"keeps a tensor with a graph in {type(part).__name__} ({name})"
                del made[id(tensor)]
    return None


def _held(references: Iterable[TensorReference]) -> list[TensorReference]:
    # A graph holds tensors without their Python objects.
    probe = [torch.empty(0)]
    once = _holders(weakref.ref(probe[0]))
    return [reference for reference in references if _holders(reference) >= once]


def _holders(reference: TensorReference) -> int:
    tensor = reference()
    if tensor is None:
        return 0
    # More than one: C++ objects hold the tensor, which together count as one holder of the object.
    shared: bool = tensor._use_count() > 1  # type: ignore[attr-defined]  # private
    return sys.getrefcount(tensor) - int(shared)


def _is_held_by_graph(reference: TensorReference) -> bool:
    """Whether all objects that hold a tensor belong to the contexts of `autograd.Function`s."""
    level = [reference()]
    frame = sys._getframe()
    # At most a container, the attributes of a context, and the context.
    for _ in range(3):
        skipped = {id(level), id(frame)}
        level = [holder for holder in gc.get_referrers(*level) if id(holder) not in skipped]
        if any(isinstance(holder, BackwardCFunction) for holder in level):
            return True
    return False


def _tensors_below(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in containers and objects, without those of modules."""
    items = [held for item in _containers_below(value) for held in (item, *_held_by(item))]
    tensors = {id(item): item for item in items if isinstance(item, torch.Tensor)}
    return list(tensors.values())


def sample_of(tensor: torch.Tensor, most: int = SAMPLE, turn: int = 0) -> torch.Tensor | None:
    """Return up to `most` values in one dimension; None for tensors without plain memory.

    Values of a tensor without gaps begin at another place in each turn.
    """
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    count = tensor.numel()
    if not is_plain or not count or tensor.is_quantized or tensor.is_meta:
        return None
    # Their memory has other values than they show.
    if tensor.is_conj() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes)
    if span != count:  # expanded, or a part of other memory
        steps = tuple(slice(None, None, max(1, size // 3)) for size in tensor.shape)
        tensor = tensor[steps].contiguous()
        count = tensor.numel()
    step = max(1, (count - 1) // (most - 1))
    first = turn % step
    size = (count - 1 - first) // step + 1
    return tensor.as_strided((size,), (step,), tensor.storage_offset() + first).clone()


def hash_of(sample: torch.Tensor) -> int:
    """Hash the bits of a result of `sample_of` on a CPU."""
    return zlib.crc32(sample.view(torch.uint8).numpy().data)
