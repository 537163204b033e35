"""Objects that reads of samples can reach, and their changes: counters, caches, seen samples."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

from samestep.data.batch_structure import equal
from samestep.distributed.collective_check import is_library_file

_DEPTH = 8  # of attributes and containers that are searched
_OBJECTS = 2000  # that are searched
_ITEMS = 50  # of a container that are searched
_LEAVES = (bool, int, float, complex, str, bytes, type(None), ModuleType)
_COPIED_BYTES = 2**18  # of an array, at most; a larger one is hashed
_HASHED_BYTES = 2**26

GENERATORS = (
    torch.Generator,
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
)


def objects_of(*roots: Any) -> Iterator[Any]:
    """Yield objects that reads can reach, near ones first.

    By attributes, containers, classes, closures, bound arguments, and names of globals in code.
    """
    seen: set[int] = set()
    pending = deque((root, _DEPTH) for root in roots)
    while pending and len(seen) < _OBJECTS:
        value, depth = pending.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if depth and not isinstance(value, GENERATORS):
            pending.extend((part, depth - 1) for part in _parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    parts: Iterable[Any]
    if isinstance(value, dict):
        parts = islice(value.values(), _ITEMS)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = islice(value, _ITEMS)
    elif isinstance(value, FunctionType):
        parts = [*_names_of(value).values(), *(value.__defaults__ or ()), *vars(value).values()]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, type):
        parts = _parts_of_class(value)
    else:
        parts = [*_attributes(value).values(), getattr(value, "__self__", None)]
        parts = [*parts, *type(value).__mro__]
    return list(parts)


def _parts_of_class(value: type) -> list[Any]:
    """Return the attributes of a class of the script; none of other classes."""
    parts = []
    for one in vars(value).values():
        function = getattr(one, "__func__", one)  # of a class method
        parts.append(getattr(function, "fget", function))  # of a property
    if any(isinstance(one, FunctionType) and _is_of_script(one) for one in parts):
        return parts
    return []


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    for one in type(value).__mro__:
        names = vars(one).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            with suppress(AttributeError):  # without a value
                attributes[name] = getattr(value, name)
    return attributes


def _names_of(function: FunctionType) -> dict[str, Any]:
    """Return the values of globals and outer variables in the code of a function, by name."""
    named = {}
    if _is_of_script(function):
        known = function.__globals__
        named = {name: known[name] for name in function.__code__.co_names if name in known}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # of an empty cell
            named[name] = cell.cell_contents
    return named


def _is_of_package(value: Any) -> bool:
    module = type(value).__module__  # of some classes in C, this is a descriptor
    return isinstance(module, str) and module.startswith("samestep.")


def _is_of_script(function: FunctionType) -> bool:
    return not is_library_file(function.__code__.co_filename)


def _content(value: Any) -> Any:
    """Return a copy of what an object holds itself; None if it cannot change."""
    content: Any
    if isinstance(value, dict):
        content = dict(value)
    elif isinstance(value, list | deque):
        content = list(value)
    elif isinstance(value, set):
        content = set(value)
    elif isinstance(value, FunctionType):
        # With names: a function can count in a global or an outer variable.
        content = {**vars(value), **_names_of(value)}
    elif isinstance(value, torch.Tensor):
        content = _content_of_tensor(value)
    elif isinstance(value, numpy.ndarray):
        content = _content_of_array(value)
    else:
        content = _attributes(value)
    return content


def _content_of_tensor(value: torch.Tensor) -> Any:
    # Tensors of inference mode have no version.
    if type(value) is not torch.Tensor or value.is_inference():
        return None
    if value.device.type == "cpu" and value.nbytes <= _COPIED_BYTES:
        return value.detach().clone()
    return value._version  # torch counts the writes


def _content_of_array(value: numpy.ndarray[Any, Any]) -> Any:
    if not value.flags.writeable:
        return None
    if value.nbytes <= _COPIED_BYTES:
        return value.copy()
    if value.flags.c_contiguous and not value.dtype.hasobject:
        # A hash: NumPy counts no writes.
        return zlib.crc32(value.view(numpy.uint8).reshape(-1)[:_HASHED_BYTES].data)
    return None


class ReadState:
    """State of the objects that reads can reach, to be compared with a later one.

    Random generators, positions of files, and objects of this package, such as a cache of decoded
    images, are no part of it.

    Args:
        roots: data sets and functions.
    """

    def __init__(self, *roots: Any) -> None:
        reached = [
            value
            for value in objects_of(*roots)
            if not isinstance(value, GENERATORS) and not _is_of_package(value)
        ]
        # Objects are kept alive, so that no other object has the address of one.
        self._kept = [(value, _content(value)) for value in reached]

    def differs(self, other: ReadState) -> bool:
        """Whether an object of both states holds something else."""
        contents = {id(value): content for value, content in other._kept}
        return any(
            id(value) in contents and not comparable(content, contents[id(value)])
            for value, content in self._kept
        )


def comparable(one: Any, other: Any) -> bool:
    """Whether values are equal; not if they cannot be compared."""
    try:
        return equal(one, other)
    except Exception:  # boundary: the equality is the script's
        return False
