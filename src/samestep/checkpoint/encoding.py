"""State of objects as JSON with named tensors, and its comparison with present objects."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.data.batch_plan import content_of
from samestep.data.whole_batches import WholeBatches
from samestep.errors import CheckpointError, InputError

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_TYPE = "$type"  # key of a JSON object that stands for a value of another type
# Types by name: the values that one object contains, and the object made from these values.
_TYPES: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda items: deque(*items)),
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
# Settings of an optimizer and schedules, by name.
Settings = dict[str, dict[str, Any]]
_OF_MODULES = frozenset(vars(nn.Module()))
_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


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
    if value is None or kind in (bool, int, float) or _is_text(value):
        return value
    if kind is list:
        return [encode(item, tensors, f"{place}.{number}") for number, item in enumerate(value)]
    if kind is dict and _TYPE not in value and all(map(_is_text, value)):
        return {key: encode(item, tensors, f"{place}.{key}") for key, item in value.items()}
    for name, (known, contents, _) in _TYPES.items():
        if kind is known:
            items = encode(contents(value), tensors, place)
            if kind in (set, frozenset):
                items = sorted(items, key=json.dumps)
            return {_TYPE: name, "items": items}
    if isinstance(value, torch.Tensor) and _is_savable(value):
        encoded = {_TYPE: "tensor", "name": _named(value, tensors, place)}
        if value.device.type != "cpu":
            encoded["device"] = value.device.type
        return encoded
    if isinstance(value, numpy.ndarray | numpy.generic) and _is_savable_array(value):
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
    is_wide_complex = tensor.is_complex() and tensor.dtype is not torch.complex64
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_meta or is_wide_complex
    )


def _named(tensor: torch.Tensor, tensors: Tensors, place: str) -> str:
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


def replay_schedule(schedule: LRScheduler, saved: dict[str, Any]) -> None:
    """Bring a new schedule of the script to the step of a saved one with other settings."""
    if isinstance(schedule, ReduceLROnPlateau):  # a function of metrics, which are gone
        progress = {key: saved[key] for key in _PROGRESS if key in saved}
        schedule.load_state_dict({**schedule.state_dict(), **progress})
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there were no steps of the optimizer
        for _ in range(saved["last_epoch"] - schedule.last_epoch):
            schedule.step()


def settings_of(optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> Settings:
    """Return the settings with which a script made its optimizer and schedules, as JSON.

    Call this before training: schedules change the settings of an optimizer.
    """
    settings = {
        f"optimizer group {number}": {
            key: value
            for key, value in group.items()
            if key not in ("params", *_IMPLEMENTATION_FLAGS)
        }
        for number, group in enumerate(optimizer.param_groups)
    }
    settings |= {
        name: one.state_dict() for name, one in objects.items() if isinstance(one, LRScheduler)
    }
    result: Settings = json.loads(json.dumps(settings, default=_described, skipkeys=True))
    return result


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return value.tolist()
    return type(value).__qualname__


def changed_keys(saved: Settings, current: Settings) -> dict[str, list[str]]:
    """Return the keys of the settings with another value."""
    keys = {
        name: [key for key in values if key in saved[name] and saved[name][key] != values[key]]
        for name, values in current.items()
        if name in saved
    }
    return {name: changed for name, changed in keys.items() if changed}


def attributes_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain attributes of objects and of their modules: numbers, text, or a hash.

    A resumption compares them, since `state_dict` need not contain them.
    """
    attributes = {}
    for name, one in objects.items():
        if isinstance(one, LRScheduler | WholeBatches):  # whose state is complete
            continue
        parts = one.named_modules() if isinstance(one, nn.Module) else [("", one)]
        for inner, part in parts:
            for key, value in getattr(part, "__dict__", {}).items():
                fact = None if key in _OF_MODULES else _fact(value)
                if fact is not None:
                    attributes[".".join(filter(None, (name, inner, key)))] = fact
    return attributes


def _fact(value: Any) -> Any:
    if type(value) in (bool, int, float, str):
        return value
    if type(value) is deque:
        value = list(value)
    if type(value) in (torch.Tensor, numpy.ndarray, list, tuple, dict):
        return f"contents with hash {content_of(value)}"
    return None


def attribute_changes(saved: Mapping[str, Any], objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attributes that a checkpoint did not restore."""
    current = attributes_of(objects)
    for name, before in saved.items():
        if name in current and before != current[name]:
            yield f"{name} is {current[name]}, and was {before} when it was saved"


def setting_changes(
    name: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings with another value; a checkpoint of another version can lack some."""
    current = json.loads(json.dumps(current))
    for key in current:
        if key in saved and saved[key] != current[key]:
            yield f"{name}: {key} is {current[key]}, and was {saved[key]}"


def require_unchanged_settings(changes: list[str], *, accept_changes: bool) -> None:
    """Refuse changed settings of a run that resumes, unless `accept_changes` is set.

    Raises:
        CheckpointError: there are changes.
    """
    if changes and not accept_changes:
        raise _other_loop(
            "; ".join(changes),
            "the values with which the run began, so that the result is that of one run",
        )


def require_same_names(kind: str, saved: Collection[str], current: Collection[str]) -> None:
    """Refuse engines, loaders or objects with other names than those of the checkpoint.

    Raises:
        InputError: names differ.
    """
    if set(saved) != set(current):
        before, own = (
            ", ".join(sorted(filter(None, names))) or "none" for names in (saved, current)
        )
        raise _other_loop(
            f"the names of its {kind} were {before}, and are {own}", f"{kind} by the same names"
        )


def _other_loop(problem: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"the run differs from that of the checkpoint: {problem}",
        expected=expected,
        fix="restore them; or continue with new values or additional objects: samestep resume RUN "
        "--accept-changes, in a script checkpoints.resume(accept_changes=True)",
        code="E_RESUME_CHANGED",
    )


def groups_like(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved parameter groups of an optimizer for its present groups.

    Both have names of parameters.

    Raises:
        CheckpointError: the groups are those of another optimizer.
    """
    if [set(group) for group in current] != [set(group) for group in saved]:
        problem = "its settings are those of another optimizer, or of other parameter groups"
        raise other_state("optimizer", problem)
    if [group["params"] for group in current] != [group["params"] for group in saved]:
        raise other_state("optimizer", "it trained other parameters")
    # How a step is computed depends on the machine.
    implementation = [
        {flag: group[flag] for flag in _IMPLEMENTATION_FLAGS if flag in group} for group in current
    ]
    return [{**group, **flags} for group, flags in zip(saved, implementation, strict=True)]


def other_state(kind: str, problem: str) -> CheckpointError:
    """Return the error for the state of another optimizer or schedule."""
    return CheckpointError(
        f"the {kind} state does not match: {problem}",
        expected=f"the {kind} of the checkpoint",
        fix="start a new run from these weights",
        code="E_RESUME_CHANGED",
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
