"""Checksum of the state of a training run, equal for every strategy and number of ranks that gives the same state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from samestep.checkpoint.compatibility import encode_objects
from samestep.checkpoint.json_values import Tensors, encode
from samestep.checkpoint.state import Training
from samestep.distributed.world import all_gather
from samestep.engine.engine import Engine
from samestep.engine.weighted_checksum import MODULUS, Part, sum_of_parts
from samestep.microbatches import Cursor


@dataclass
class StateParts:
    """Contribution of one rank to the checksum of a state.

    Attributes:
        tensors: parts of tensors by name.
        values: other values as text, by name.
    """

    tensors: dict[str, Part] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def state_checksum(engine: Engine, cursor: Cursor) -> int | None:
    """Return 64 bits that depend on every bit of the state of `engine`; None on ranks other than 0 unless divided.

    The state consists of parameters, persistent buffers, state and groups of the optimizer, moving average, state
    of scaler, schedule and modules, number of steps, and the position `cursor`. Tensors enter as in `checksum`, other
    values by their BLAKE2 hash.

    A collective of 8 bytes if parameters are divided; otherwise only rank 0 computes. Waits for a GPU once.

    Raises:
        InputError: the state has a value that a checkpoint cannot hold.
    """
    is_divided, world = engine.local_parameters.is_divided, engine.world
    if not (world.is_main or is_divided):
        return None
    parts = state_parts(engine, cursor)
    total = sum_of_parts(parts.tensors, world.device) + sum_of_values(parts.values)
    if is_divided:
        world.all_reduce(total)  # integers: the sum has no rounding, and wraps around
    return int(total) % MODULUS


def checksum_event(engine: Engine, cursor: Cursor) -> dict[str, Any]:
    """Return the fields of an event with the checksum of the state, in hexadecimal digits; collective as the checksum.

    On ranks other than 0, which log nothing, the checksum may be missing.
    """
    value = state_checksum(engine, cursor)
    return {"step": engine.steps, "checksum": f"{value:016x}"} if value is not None else {}


def checksums_by_name(engine: Engine, cursor: Cursor) -> dict[str, str]:
    """Return the contribution of each tensor and value to the checksum, in hexadecimal digits; a collective."""
    parts, world = state_parts(engine, cursor), engine.world
    local = {name: int(sum_of_parts({name: part}, torch.device("cpu"))) for name, part in parts.tensors.items()}
    local |= {name: sum_of_values({name: value}) for name, value in parts.values.items()}
    total: dict[str, int] = {}
    for row in all_gather({name: str(value) for name, value in local.items()}, world):
        for name, value in row.items():
            total[name] = (total.get(name, 0) + int(value)) % MODULUS
    return {name: f"{value:016x}" for name, value in total.items()}


def state_parts(engine: Engine, cursor: Cursor) -> StateParts:
    """Return the contribution of this rank to the checksum: each element of the state is on one rank."""
    result, training, world = StateParts(), engine.training, engine.world
    for name, kind, value in _values_of_parameters(training):
        is_tensor = isinstance(value, torch.Tensor)
        position = engine.local_parameters.position(name, value if is_tensor else torch.empty(()), world)
        if position is not None and is_tensor:
            result.tensors[f"{kind} of {name}"] = Part(value, *position)
        elif position is not None:
            result.values[f"{kind} of {name}"] = json.dumps(encode(value, {}, kind))
    replicated = _replicated_parts(training, engine.steps, cursor)  # on each rank, so that all raise the same errors
    if world.is_main:
        result.tensors |= replicated.tensors
        result.values |= replicated.values
    return result


def _values_of_parameters(training: Training) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and value of the parameters, their state in the optimizer, and their average."""
    local, state = training.parameters.local, training.optimizer.state
    for name, parameter in local.items():
        if parameter.is_meta:  # of another rank
            continue
        yield name, "value", parameter.detach()
        for key, value in state.get(parameter, {}).items():
            yield name, f"optimizer {key}", value
    for name, value in (training.average or {}).items():
        if not value.is_meta:
            yield name, "average", value


def _replicated_parts(training: Training, step: int, cursor: Cursor) -> StateParts:
    """Return the state that every rank has."""
    result, model, encoded = StateParts(), training.model, Tensors()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                result.tensors[f"buffer {path}.{name}" if path else f"buffer {name}"] = Part.whole(buffer)
    optimizer = training.optimizer
    groups = [{key: _as_loaded(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
    shared = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    values = {
        "steps": step,
        "position": astuple(cursor),
        "optimizer groups": encode(groups, encoded, "optimizer groups"),
        "optimizer state without a parameter": encode(shared, encoded, "optimizer state"),
        **encode_objects(model, training.scheduler, {}, encoded),
    }
    result.values |= {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    result.tensors |= {name: Part.whole(tensor) for name, tensor in encoded.values()}
    scaler = training.scaler
    if scaler.is_enabled():  # not `state_dict`, which waits for the device; the tensors are created in the first step
        scale = torch.tensor(scaler._init_scale) if scaler._scale is None else scaler._scale
        tracker = scaler._growth_tracker
        tracker = torch.tensor(scaler._init_growth_tracker) if tracker is None else tracker
        result.tensors |= {"scale": Part.whole(scale.float()), "growth tracker": Part.whole(tracker.int())}
    return result


def _as_loaded(value: Any) -> Any:
    """Return an option of the optimizer as a checkpoint restores it."""
    return list(value) if isinstance(value, tuple) else value


def sum_of_values(values: dict[str, str]) -> int:
    """Return the contribution of values to a checksum, as a signed integer."""
    texts = (f"{name} {value}".encode() for name, value in values.items())
    total = sum(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    return (total + 2**63) % MODULUS - 2**63
