"""Values that JSON does not have as JSON objects: containers by type, and tensors by name."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from samestep.errors import InputError

_TYPE = "$type"  # key of a JSON object that stands for a value of another type
# Types by name: the values that one object contains, and the object made from these values.
_TYPES: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda items: deque(*items)),
    "dict": (dict, lambda value: list(map(list, value.items())), dict),
    "OrderedDict": (OrderedDict, lambda value: list(map(list, value.items())), OrderedDict),
    "Counter": (Counter, lambda value: list(map(list, value.items())), lambda items: Counter(dict(items))),
    "bytes": (bytes, list, bytes),
    "str": (str, lambda value: list(value.encode(errors="surrogatepass")), lambda items: _text(bytes(items))),
    "complex": (complex, lambda value: [value.real, value.imag], lambda items: complex(*items)),
}
# Surrogates stand for bytes of file names that are not UTF-8. JSON cannot represent them.
_SURROGATE = re.compile("[\ud800-\udfff]")
Tensors = dict[int, tuple[str, torch.Tensor]]  # name and tensor by id


def encode(value: Any, tensors: Tensors, place: str) -> Any:
    """Return a value as JSON, and add the tensors and arrays that it contains to `tensors`.

    Args:
        value: numbers, text, None, tensors, arrays of NumPy, and containers of these: list, dict, and `_TYPES`.
        tensors: without copies; a tensor that is referred to twice is restored as one.
        place: description of the value, such as `scheduler.base_lrs`.

    Raises:
        InputError: the value contains another type, whose restoration would have to run code.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float) or _is_text(value):
        return value
    if kind is list:
        return [encode(item, tensors, f"{place}.{number}") for number, item in enumerate(value)]
    if kind is dict and _TYPE not in value and all(map(_is_text, value)):
        return {key: encode(item, tensors, f"{place}.{key}") for key, item in value.items()}
    for name, (known, contents, _) in _TYPES.items():
        if kind is known:
            items = encode(contents(value), tensors, place)
            return {_TYPE: name, "items": sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
    if isinstance(value, torch.Tensor) and _is_savable(value):
        device = {} if value.device.type == "cpu" else {"device": value.device.type}
        return {_TYPE: "tensor", "name": _named(value, tensors, place), **device}
    if isinstance(value, numpy.ndarray | numpy.generic) and _is_savable_array(value):
        array = torch.from_numpy(numpy.array(value))
        name = "array" if isinstance(value, numpy.ndarray) else "numpy"
        return {_TYPE: name, "name": _named(array, tensors, place)}
    raise InputError(
        f"{place} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        expected="numbers, text, None, dense tensors, arrays of NumPy, and lists, tuples, sets and dicts of these",
        fix="leave the value out of the state (state_dict, get_extra_state), or convert it to such values",
        code="E_CHECKPOINT_WRITE",
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the value that `encode` represents; tensors that were on an accelerator are moved to `device`.

    Raises:
        ValueError, TypeError, KeyError: `encode` does not write such data.
    """
    if isinstance(value, list):
        return [decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind is None:
        return {key: decode(item, tensors, device) for key, item in value.items()}
    if kind in ("tensor", "array", "numpy"):
        tensor = tensors[value["name"]]
        if kind == "tensor":
            return tensor.to(device) if "device" in value else tensor
        return tensor.numpy() if kind == "array" else tensor.numpy()[()]
    items = decode(value["items"], tensors, device)
    if not isinstance(items, list):
        raise ValueError(f"the items of a {kind} are no list")
    return _TYPES[kind][2](items)


def _is_text(value: Any) -> bool:
    return type(value) is str and _SURROGATE.search(value) is None


def _text(data: bytes) -> str:
    return data.decode(errors="surrogatepass")


def _is_savable(tensor: torch.Tensor) -> bool:
    is_wide_complex = tensor.is_complex() and tensor.dtype is not torch.complex64
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or is_wide_complex)


def _named(tensor: torch.Tensor, tensors: Tensors, place: str) -> str:
    return tensors.setdefault(id(tensor), (f"{len(tensors)}.{place}", tensor))[0]


def _is_savable_array(value: numpy.ndarray[Any, Any] | numpy.generic) -> bool:
    return value.dtype.kind in "biufc" and value.dtype.itemsize <= 8 and value.dtype.isnative
