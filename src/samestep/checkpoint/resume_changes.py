"""Settings, attributes and names of a run that resumes, compared with those of its checkpoint."""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.data.batch_structure import content_of
from samestep.data.whole_batches import WholeBatches
from samestep.errors import CheckpointError

_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")
# Keys of a ReduceLROnPlateau that steps change; the others are settings.
_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
_OF_MODULES = frozenset(vars(nn.Module()))  # such as `training`, which loops change
# Settings of an optimizer and schedules, by name.
Settings = dict[str, dict[str, Any]]


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
    # Through JSON, as in a checkpoint: tuples become lists.
    result: Settings = json.loads(json.dumps(settings, default=_described, skipkeys=True))
    return result


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        return value.tolist()
    # Not the text of an object, which can contain an address.
    return type(value).__qualname__


def changed_keys(saved: Settings, current: Settings) -> dict[str, list[str]]:
    """Return the keys of the settings with another value."""
    keys = {
        name: [key for key in values if _has_changed(key, saved[name], values)]
        for name, values in current.items()
        if name in saved
    }
    return {name: changed for name, changed in keys.items() if changed}


def _has_changed(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether a saved value is another one; a value that is not a number equals itself."""
    if key not in saved:
        return False
    numbers = [one for one in (saved[key], current[key]) if isinstance(one, float)]
    are_undefined = len(numbers) == 2 and all(map(math.isnan, numbers))
    return bool(saved[key] != current[key]) and not are_undefined


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
        if name in current and _has_changed(name, saved, current):
            yield f"{name} is {current[name]}, and was {before} when saved"


def setting_changes(
    name: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings with another value; a checkpoint of another version can lack some."""
    current = json.loads(json.dumps(current))
    for key in current:
        if _has_changed(key, saved, current):
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
