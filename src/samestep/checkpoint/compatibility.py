"""Comparison of saved state with the objects that receive it: structure, types, shapes and ranges.

A file that matches its manifest can still hold any values. Without a comparison they would fail later, in the code of
an optimizer or a schedule.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
_TRIAL_SIZE = 2
_MAX_NUMBER = 2.0**62
# These need a closure or sparse gradients for a step.
_WITHOUT_TRIAL = ("LBFGS", "SparseAdam")


def like_current(saved: Any, current: Any, where: str) -> Any:
    """Return a value from JSON with the types of the current value at the same position.

    Private attributes of objects can differ between versions of torch: unknown ones are left out, and missing ones keep
    their current value.

    Raises:
        ValueError: the structure or a type differs, or a number is not finite.
    """
    if isinstance(current, MutableMapping):
        return _mapping_like(saved, current, where)
    if isinstance(current, list | tuple):
        if not isinstance(saved, list) or len(saved) != len(current):
            raise ValueError(f"{where} is no list of {len(current)} values")
        pairs = enumerate(zip(saved, current, strict=True))
        return type(current)(like_current(value, own, f"{where}.{number}") for number, (value, own) in pairs)
    if isinstance(current, str):
        if saved != current:
            raise ValueError(f"{where} is not {current!r}")
    elif isinstance(current, bool):
        if not isinstance(saved, bool | None):
            raise ValueError(f"{where} is no boolean")
    elif isinstance(current, int | float):
        _require_number(saved, where, allow_infinity=math.isinf(current))
    elif saved is not None and not isinstance(saved, bool | str):
        _require_number(saved, where)
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
    own = {str(key): key for key in current}  # keys in JSON are text
    differing = sorted(name for name in {*own} ^ {*saved} if not name.startswith("_"))
    if differing:
        raise ValueError(f"{where} has other keys: {', '.join(differing[:5])}")
    result = copy.copy(current)
    for name, key in own.items():
        if name in saved:
            result[key] = like_current(saved[name], current[key], f"{where}.{name}")
    return result


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
    options = {name: value for name, value in group.items() if name in known and name != "params"}
    options |= {name: False for name in IMPLEMENTATION_FLAGS if name in known}
    parameter = torch.nn.Parameter(torch.zeros((_TRIAL_SIZE,) * dimensions))
    trial = kind([parameter], **options)
    parameter.grad = torch.zeros_like(parameter)
    trial.step()
    return dict(trial.state[parameter])
