"""State between objects and files: values that JSON does not have, and comparison with the objects that receive them.

A file that matches its manifest can still hold any values. Without a comparison they would fail later, in the code of
an optimizer or a schedule. A loop that resumes is compared with that of the checkpoint: engines, loaders, settings.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.checkpoint.json_values import Tensors, encode
from samestep.distributed.logging import logger
from samestep.errors import CheckpointError, InputError

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_TRIAL_SIZE = 2
_MAX_NUMBER = 2.0**62
# These need a closure or sparse gradients for a step.
_WITHOUT_TRIAL = ("LBFGS", "SparseAdam")
# State of the user's functions in schedulers of torch, with any structure.
_FUNCTION_STATE = ("lr_lambdas", "_scale_fn_custom")


def like_current(saved: Any, current: Any, where: str) -> Any:
    """Return a saved value with the types of the current containers at the same position.

    Private attributes of objects can differ between versions of torch: unknown ones are left out, and missing ones keep
    their current value.

    Raises:
        ValueError: the structure or a type differs, or a number is not finite.
    """
    if isinstance(current, MutableMapping):
        return _mapping_like(saved, current, where)
    if isinstance(current, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(current):
            raise ValueError(f"{where} is no list of {len(current)} values")
        pairs = enumerate(zip(saved, current, strict=True))
        return type(current)(like_current(value, own, f"{where}.{number}") for number, (value, own) in pairs)
    current_number, number = _scalar(current), _scalar(saved)
    if isinstance(current_number, torch.Tensor | numpy.ndarray):
        _require_array(saved, current_number, where)
    elif isinstance(current, set | frozenset | bytes | complex):
        if type(saved) is not type(current):
            raise ValueError(f"{where} is no {type(current).__name__}")
    elif isinstance(current, str):
        if saved != current:
            raise ValueError(f"{where} is not {current!r}")
    elif isinstance(current_number, bool):
        if not isinstance(number, bool | None):
            raise ValueError(f"{where} is no boolean")
    elif isinstance(current_number, int | float):
        _require_number(number, where, allow_infinity=math.isinf(current_number))
    elif saved is not None and not isinstance(saved, bool | str):
        _require_number(number, where)
    return saved


def require_slots(
    expected: Mapping[str, Any],
    shape: torch.Size,
    slots: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    name: str,
) -> None:
    """Require the state of one parameter that the optimizer itself would create.

    Args:
        expected: result of `trial_state` for the number of dimensions of the parameter.
        shape: shape of the complete parameter.
        slots: saved tensors by slot.
        numbers: other saved values by slot.
        name: name of the parameter.

    Raises:
        ValueError: a slot is missing, unknown, or of another type or shape.
    """
    if {*slots, *numbers} != set(expected):
        raise ValueError(f"{name} has the state {sorted({*slots, *numbers})} instead of {sorted(expected)}")
    for slot, value in numbers.items():
        # A parameter without a gradient has no momentum yet.
        if isinstance(expected[slot], torch.Tensor) and not (value is None and slot == "momentum_buffer"):
            raise ValueError(f"{slot} of {name} is no tensor")
        like_current(value, None, f"{slot} of {name}")
    for slot, tensor in slots.items():
        own = expected[slot]
        is_tensor = isinstance(own, torch.Tensor) and own.is_floating_point() == tensor.is_floating_point()
        # The rows and columns of Adafactor have one element in some dimensions.
        if not is_tensor or tensor.shape != tuple(
            full if size == _TRIAL_SIZE else size for size, full in zip(own.shape, shape, strict=False)
        ):
            raise ValueError(f"{slot} of {name} is {tensor.dtype} with shape {tuple(tensor.shape)}")


def _mapping_like(saved: Any, current: MutableMapping[Any, Any], where: str) -> Any:
    if not isinstance(saved, dict):
        raise ValueError(f"{where} is no mapping")
    names = {key: key if key in saved else str(key) for key in current}  # keys of older checkpoints are text
    differing = {*map(str, names.values())} ^ {*map(str, saved)}
    differing = {name for name in differing if not name.startswith("_")}
    if differing:
        raise ValueError(f"{where} has other keys: {', '.join(sorted(differing)[:5])}")
    result = copy.copy(current)
    for key, name in names.items():
        if name in saved:
            like = _function_state_like if key in _FUNCTION_STATE else like_current
            result[key] = like(saved[name], current[key], f"{where}.{key}")
    return result


def _function_state_like(saved: Any, current: Any, where: str) -> Any:
    """Return the state of functions that a scheduler calls, if as many of the same functions are objects with state."""
    if isinstance(current, list):
        if not isinstance(saved, list) or len(saved) != len(current):
            raise ValueError(f"{where} is no list of {len(current)} values")
        return [_function_state_like(*pair, where) for pair in zip(saved, current, strict=True)]
    if type(saved) is not type(current):
        raise ValueError(f"{where} is the state of another function")
    return saved


def _scalar(value: Any) -> Any:
    """Return the number of a tensor or an array with one element; other values are unchanged."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, numpy.ndarray | numpy.generic) and value.size == 1 else value


def _plain(value: Any) -> Any:
    """Return an option of an optimizer with numbers in place of tensors."""
    return tuple(map(_scalar, value)) if isinstance(value, tuple) else _scalar(value)


def _require_array(saved: Any, current: torch.Tensor | numpy.ndarray[Any, Any], where: str) -> None:
    if type(saved) is not type(current) or saved.shape != current.shape or saved.dtype != current.dtype:
        raise ValueError(f"{where} is no array of {current.dtype} with shape {tuple(current.shape)}")
    if not torch.isfinite(torch.as_tensor(saved)).all():
        raise ValueError(f"{where} has a number that is not finite")


def _require_number(value: Any, where: str, *, allow_infinity: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{where} is no number")
    is_infinite = value in (math.inf, -math.inf)
    if not (abs(value) <= _MAX_NUMBER or (is_infinite and allow_infinity)):  # NaN is neither
        raise ValueError(f"{where} is {value if abs(value) == math.inf else 'a number'} out of range")


def trial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dimensions: int) -> dict[str, Any] | None:
    """Return the state that the optimizer creates in one step for a parameter of `_TRIAL_SIZE` in every dimension.

    Returns:
        Tensors and other values by slot; None for an optimizer that is not torch's, whose state is unknown.

    Raises:
        ValueError: an option of the group is out of its range.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim.") or kind.__name__ in _WITHOUT_TRIAL:
        return None
    known = inspect.signature(kind).parameters
    options = {name: _plain(value) for name, value in group.items() if name in known and name != "params"}
    options |= {name: False for name in _IMPLEMENTATION_FLAGS if name in known}
    parameter = torch.nn.Parameter(torch.zeros((_TRIAL_SIZE,) * dimensions))
    trial = kind([parameter], **options)
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return dict(trial.state[parameter])


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
            code="E_CHECKPOINT_STATE",
        )
    return value.state_dict()


def load_object(value: Any, state: Any) -> None:
    """Restore the state that `object_state` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, LRScheduler):
        load_schedule(value, state)
    else:
        value.load_state_dict(state)


def load_schedule(scheduler: LRScheduler, saved: Any) -> None:
    """Restore the state of a scheduler; that of a scheduler of torch has the structure of its present state."""
    current = scheduler.state_dict()
    if isinstance(scheduler, ReduceLROnPlateau):
        current["best"] = scheduler.mode_worse  # infinite until the first value
    is_known = type(scheduler).__module__.startswith("torch.optim.")
    scheduler.load_state_dict(like_current(saved, current, "scheduler") if is_known else saved)


def require_objects(objects: Mapping[str, Any], saved: Mapping[str, Any], *, new_objects: bool) -> None:
    """Refuse the state of other objects than saved ones; `new_objects` may be added.

    Raises:
        CheckpointError: names differ.
    """
    missing, unknown = sorted(set(saved) - set(objects)), sorted(set(objects) - set(saved))
    if missing or (unknown and not new_objects):
        raise CheckpointError(
            f"the checkpoint has the state of {', '.join(saved) or 'no objects'}, and the loop passes "
            f"{', '.join(objects) or 'none'}",
            expected="the same objects in CheckpointManager(..., state={...}) as when the checkpoint was written",
            fix="pass them by the same names; to add objects with their present state: "
            "checkpoints.resume(accept_changes=True)",
            code="E_RESUME_CHANGED",
        )


def setting_changes(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings with another value; a checkpoint of another version can lack some."""
    current = json.loads(json.dumps(current))
    for key in current:
        if key in saved and saved[key] != current[key]:
            yield f"{name}: {key} is {current[key]}, and was {saved[key]}"


def require_unchanged_settings(changes: list[str], is_main: bool, *, accept_changes: bool) -> None:
    """Refuse changed settings of a run that resumes; with `accept_changes`, rank 0 logs them.

    Raises:
        InputError: there are changes, and `accept_changes` is not set.
    """
    if changes and not accept_changes:
        raise _other_loop(
            "; ".join(changes), "the values with which the run began, so that the result is that of one run"
        )
    for change in changes if is_main else ():
        logger.warning("continuing with a change: %s", change)


def require_same_engines(saved: set[str], current: set[str]) -> None:
    """Refuse engines with other names than those of the checkpoint.

    Raises:
        InputError: names differ.
    """
    if saved != current:
        before, own = (", ".join(sorted(filter(None, names))) or "one engine" for names in (saved, current))
        raise _other_loop(f"the checkpoint is of {before}, and the loop of {own}", "engines by the same names")


def require_same_loaders(saved: set[str], current: set[str]) -> None:
    """Refuse loaders with other names than those of the checkpoint, if it has any.

    Raises:
        InputError: names differ.
    """
    if saved and saved != current:
        raise _other_loop(
            f"the checkpoint has the loaders {sorted(saved)}, and the loop {sorted(current)}",
            "loaders by the same names",
        )


def _other_loop(problem: str, expected: str) -> InputError:
    return InputError(
        f"the run differs from that of the checkpoint: {problem}",
        expected=expected,
        fix="restore them; or continue with the new values, if the names are the same: samestep resume RUN "
        "--accept-changes, in a script checkpoints.resume(accept_changes=True)",
        code="E_RESUME_CHANGED",
    )


def groups_like(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved parameter groups of an optimizer for its present groups, with names of parameters.

    Raises:
        CheckpointError: the groups are those of another optimizer.
        ValueError: a value has another type.
    """
    if [set(group) for group in current] != [set(group) for group in saved]:
        raise other_optimizer("its settings are those of another optimizer, or of other parameter groups")
    if [group["params"] for group in current] != [group["params"] for group in saved]:
        raise other_optimizer("it trained other parameters")
    # How a step is computed depends on the machine.
    implementation = [{flag: group[flag] for flag in _IMPLEMENTATION_FLAGS if flag in group} for group in current]
    groups = like_current(saved, current, "groups")
    return [{**group, **flags} for group, flags in zip(groups, implementation, strict=True)]


def other_optimizer(problem: str) -> CheckpointError:
    """Return the error for the state of another optimizer."""
    return CheckpointError(
        f"the optimizer state does not match: {problem}",
        expected="the optimizer and the parameter groups of the checkpoint",
        fix="start a new run from these weights",
        code="E_CHECKPOINT_OPTIMIZER",
    )


def encode_objects(
    model: torch.nn.Module, scheduler: LRScheduler | None, objects: Mapping[str, Any], tensors: Tensors
) -> dict[str, Any]:
    """Return the state of schedule, modules and objects as JSON, and add the tensors that it contains to `tensors`.

    Raises:
        InputError: a value has a type that a checkpoint cannot hold.
    """
    extra = {name: value for name, value in model.state_dict().items() if name.endswith(EXTRA_STATE)}
    states = {name: object_state(name, value) for name, value in objects.items()}
    return {
        "scheduler": encode(scheduler.state_dict() if scheduler else None, tensors, "scheduler"),
        "extra": {name: encode(value, tensors, name) for name, value in extra.items()},
        "objects": {name: encode(value, tensors, f"state.{name}") for name, value in states.items()},
    }


def require_savable(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    objects: Mapping[str, Any],
) -> None:
    """Refuse state that a checkpoint cannot hold; the state of the optimizer need not exist yet.

    Raises:
        InputError: there is such state.
    """
    encode_objects(model, scheduler, objects, {})
    encode(optimizer.state_dict()["param_groups"], {}, "optimizer.groups")
    for name, value in model.state_dict().items():
        if not getattr(value, "is_meta", False):  # of another rank
            encode(value, {}, name)
