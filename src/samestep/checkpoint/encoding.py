"""State of objects as JSON with named tensors."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.resume_changes import other_state
from samestep.errors import InputError

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
_TYPE = "$type"  # key of a JSON object that stands for a value of another type
# Types by name: the values that one object contains, and the object made from these values.
_TYPES: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda items: deque(*items)),
    # A dict with keys that JSON does not have, or with the key `_TYPE`.
    "dict": (dict, lambda value: list(map(list, value.items())), dict),
    "OrderedDict": (OrderedDict, lambda value: list(map(list, value.items())), OrderedDict),
    "Counter": (
        Counter,
        lambda value: list(map(list, value.items())),
        lambda items: Counter(dict(items)),
    ),
    "bytes": (bytes, list, bytes),
    "str": (
        str,
        lambda value: list(value.encode(errors="surrogatepass")),
        lambda items: bytes(items).decode(errors="surrogatepass"),
    ),
    "complex": (complex, lambda value: [value.real, value.imag], lambda items: complex(*items)),
}
# Surrogates stand for bytes of file names that are not UTF-8. JSON cannot represent them.
_SURROGATE = re.compile("[\ud800-\udfff]")
Tensors = dict[int, tuple[str, torch.Tensor]]  # name and tensor by id


def encode(value: Any, tensors: Tensors, place: str) -> Any:
    """Return a value as JSON, and add the tensors and arrays that it contains to `tensors`.

    Args:
        value: numbers, text, None, tensors, arrays of NumPy, and containers of these: list, dict,
            and `_TYPES`.
        tensors: without copies; a tensor that is referred to twice is restored as one.
        place: description of the value, such as `scheduler.base_lrs`.

    Raises:
        InputError: the value contains another type, whose restoration would have to run code.
    """
    kind = type(value)
    # Exact types: a subclass, such as an enumeration, would be restored as another type.
    if value is None or kind in (bool, int, float) or _is_text(value):
        return value
    if kind is list:
        return [encode(item, tensors, f"{place}.{number}") for number, item in enumerate(value)]
    if kind is dict and _TYPE not in value and all(map(_is_text, value)):
        return {key: encode(item, tensors, f"{place}.{key}") for key, item in value.items()}
    for name, (known, contents, _) in _TYPES.items():
        if kind is known:
            items = encode(contents(value), tensors, place)
            # The order of a set is another one in each process, and ranks compare hashes of states.
            if kind in (set, frozenset):
                items = sorted(items, key=json.dumps)
            return {_TYPE: name, "items": items}
    if isinstance(value, torch.Tensor) and _is_savable(value):
        encoded = {_TYPE: "tensor", "name": _named(value, tensors, place)}
        if value.device.type != "cpu":
            encoded["device"] = value.device.type
        return encoded
    if isinstance(value, numpy.ndarray | numpy.generic) and _is_savable_array(value):
        # Copied: torch takes no negative strides, and warns of read-only memory.
        array = torch.from_numpy(numpy.array(value))
        name = "array" if isinstance(value, numpy.ndarray) else "numpy"
        return {_TYPE: name, "name": _named(array, tensors, place)}
    raise InputError(
        f"{place} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        expected="numbers, text, None, dense tensors, arrays of NumPy, and lists, tuples, sets "
        "and dicts of these",
        fix="leave the value out of the state (state_dict, get_extra_state), or convert it to such "
        "values",
        code="E_CHECKPOINT_WRITE",
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the value that `encode` represents; tensors of an accelerator are moved to `device`.

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
        restored: Any = tensors[value["name"]]
        if kind != "tensor":
            restored = restored.numpy()
        elif "device" in value:
            restored = restored.to(device)
        if kind == "numpy":
            restored = restored[()]  # a scalar
        return restored
    items = decode(value["items"], tensors, device)
    if not isinstance(items, list):
        raise ValueError(f"the items of a {kind} are no list")
    return _TYPES[kind][2](items)


def _is_text(value: Any) -> bool:
    return type(value) is str and _SURROGATE.search(value) is None


def _is_savable(tensor: torch.Tensor) -> bool:
    # safetensors has complex numbers of two float32 alone.
    is_wide_complex = tensor.is_complex() and tensor.dtype is not torch.complex64
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_meta or is_wide_complex
    )


def _named(tensor: torch.Tensor, tensors: Tensors, place: str) -> str:
    # The entry keeps the tensor alive: no other one has this `id` meanwhile.
    return tensors.setdefault(id(tensor), (f"{len(tensors)}.{place}", tensor))[0]


def _is_savable_array(value: numpy.ndarray[Any, Any] | numpy.generic) -> bool:
    return value.dtype.kind in "biufc" and value.dtype.itemsize <= 8 and value.dtype.isnative


def object_state(name: str, value: Any) -> Any:
    """Return the state of an object with `state_dict`, a generator of torch, or a dict.

    Raises:
        InputError: the object is none of these.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return dict(value)
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise InputError(
            f"state has {name!r} of type {type(value).__name__}",
            expected="objects with state_dict and load_state_dict, generators of torch, and dicts",
            fix="pass the object, or a dict with the value, which is restored in place",
            code="E_CHECKPOINT_WRITE",
        )
    return value.state_dict()


def load_object(value: Any, state: Any) -> None:
    """Restore the state that `object_state` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, dict):
        # In place: the script holds this dict.
        value.clear()
        value.update(state)
    else:
        value.load_state_dict(state)


def require_loadable(value: Any, state: Any) -> None:
    """Require that a state is that of the same kind of schedule; others decide when they load it.

    Raises:
        CheckpointError: the state is that of another kind of schedule.
    """
    if not isinstance(value, LRScheduler) or not type(value).__module__.startswith("torch.optim."):
        return
    # Names that begin with an underscore differ between versions of torch.
    names = sorted(name for name in state if name[0] != "_")
    own = sorted(name for name in value.state_dict() if name[0] != "_")
    if names != own:
        raise other_state(
            "schedule", f"it has the values {', '.join(names)}, and not {', '.join(own)}"
        )


def encode_objects(
    model: torch.nn.Module,
    scheduler: LRScheduler | None,
    objects: Mapping[str, Any],
    tensors: Tensors,
) -> dict[str, Any]:
    """Return the state of schedule, modules and objects as JSON, and add its tensors to `tensors`.

    Raises:
        InputError: a value has a type that a checkpoint cannot hold.
    """
    extra = {
        name: value for name, value in model.state_dict().items() if name.endswith(EXTRA_STATE)
    }
    states = {name: object_state(name, value) for name, value in objects.items()}
    schedule = scheduler.state_dict() if scheduler else None
    return {
        "scheduler": encode(schedule, tensors, "scheduler"),
        "extra": {name: encode(value, tensors, name) for name, value in extra.items()},
        "objects": {
            name: encode(value, tensors, f"state.{name}") for name, value in states.items()
        },
    }


def require_savable(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    objects: Mapping[str, Any],
) -> None:
    """Refuse state that a checkpoint cannot hold; an optimizer has state after its first step.

    Raises:
        InputError: there is such state.
    """
    encode_objects(model, scheduler, objects, {})
    encode(optimizer.state_dict()["param_groups"], {}, "optimizer.groups")
    for slots in optimizer.state.values():
        for slot, value in slots.items() if isinstance(slots, dict) else ():
            if not isinstance(value, torch.Tensor):
                encode(value, {}, f"optimizer.{slot}")
    for name, value in model.state_dict().items():
        if not getattr(value, "is_meta", False):  # of another rank
            encode(value, {}, name)
