"""State of objects as JSON, and comparison of a loop with that of the checkpoint from which it resumes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.json_values import Tensors, encode
from samestep.distributed.logging import logger
from samestep.errors import CheckpointError, InputError

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
_IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")


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
    elif isinstance(value, LRScheduler):
        load_schedule(value, state)
    else:
        value.load_state_dict(state)


def load_schedule(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    """Restore the state of a scheduler.

    Raises:
        CheckpointError: the state is that of another kind of scheduler.
    """
    # Names that begin with an underscore differ between versions of torch.
    names, own = (sorted(name for name in state if name[0] != "_") for state in (saved, scheduler.state_dict()))
    if type(scheduler).__module__.startswith("torch.optim.") and names != own:
        raise other_state("schedule", f"it has the values {', '.join(names)}, and not {', '.join(own)}")
    scheduler.load_state_dict(saved)


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


def require_same_names(kind: str, saved: Collection[str], current: Collection[str]) -> None:
    """Refuse engines, loaders or objects with other names than those of the checkpoint.

    Raises:
        InputError: names differ.
    """
    if set(saved) != set(current):
        before, own = (", ".join(sorted(filter(None, names))) or "none" for names in (saved, current))
        raise _other_loop(f"the names of its {kind} were {before}, and are {own}", f"{kind} by the same names")


def _other_loop(problem: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"the run differs from that of the checkpoint: {problem}",
        expected=expected,
        fix="restore them; or continue with new values or additional objects: samestep resume RUN --accept-changes, "
        "in a script checkpoints.resume(accept_changes=True)",
        code="E_RESUME_CHANGED",
    )


def groups_like(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved parameter groups of an optimizer for its present groups, with names of parameters.

    Raises:
        CheckpointError: the groups are those of another optimizer.
    """
    if [set(group) for group in current] != [set(group) for group in saved]:
        raise other_state("optimizer", "its settings are those of another optimizer, or of other parameter groups")
    if [group["params"] for group in current] != [group["params"] for group in saved]:
        raise other_state("optimizer", "it trained other parameters")
    # How a step is computed depends on the machine.
    implementation = [{flag: group[flag] for flag in _IMPLEMENTATION_FLAGS if flag in group} for group in current]
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
