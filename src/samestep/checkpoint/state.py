"""State of a training run as checkpoint files: tensors as safetensors, other state as JSON.

The files do not depend on the number of ranks: names are the model's own, the position is a cursor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from samestep.checkpoint.background_writer import HostBuffers, TensorFile, distinct
from samestep.checkpoint.contents import (
    Progress,
    SavedOptimizer,
    SavedParameters,
    SavedState,
    Training,
    invalid_contents,
)
from samestep.checkpoint.durable_files import Contents, pieces
from samestep.checkpoint.encoding import (
    EXTRA_STATE,
    Tensors,
    decode,
    encode,
    encode_objects,
    load_object,
    object_state,
    require_loadable,
)
from samestep.checkpoint.manifest import file_names
from samestep.checkpoint.resume_changes import (
    attributes_of,
    changed_keys,
    groups_like,
    other_state,
    replay_schedule,
    require_same_names,
)
from samestep.checkpoint.store import STATE, read_state, read_states
from samestep.errors import CheckpointError
from samestep.launcher.process_state import process_state

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average.safetensors"
OTHERS = "others.safetensors"  # tensors that `state.json` refers to


def snapshot(
    training: Training, progress: Callable[[], Progress], buffers: HostBuffers | None
) -> dict[str, Contents]:
    """Copy the state, and return the files of a checkpoint by name, the same under every strategy.

    Args:
        training: unchanged.
        progress: returns the position of the run; called on rank 0.
        buffers: memory of the copies, one of each tensor; call its `wait` before the files are
            read. With None, the rank only takes part in gathering, and the result is empty.
    """
    parameters = training.parameters
    if buffers is None and not parameters.is_divided:
        return {}  # rank 0 holds everything: there is nothing to gather
    tensors, aliases = _pack_model(training, buffers)
    others: Tensors = {}
    slots, optimizer = _pack_optimizer(training, others, buffers)
    average = None
    if training.average is not None:
        average = _gathered(training.average, parameters, buffers)
    if buffers is None:
        return {}
    # A run can import modules after its start, and a resumption compares all of them.
    process_state.source_files.note_imports()
    state = {
        "progress": asdict(progress()),
        "aliases": aliases,
        "optimizer": optimizer,
        "scaler": training.scaler.state_dict(),
        "sources": process_state.source_files.hashes,
        "settings": training.settings,
        "attributes": attributes_of(training.named_objects),
        **encode_objects(training.model, training.scheduler, training.objects, others),
    }
    files: dict[str, Contents] = {
        MODEL: TensorFile(tensors),
        OPTIMIZER: TensorFile(slots),
        STATE: json.dumps(state, indent=1).encode(),
    }
    if average is not None:
        files[AVERAGE] = TensorFile(average)
    if others:
        files[OTHERS] = TensorFile({name: buffers.copy(tensor) for name, tensor in others.values()})
    return files


def pack(training: Training, progress: Progress, *, keep: bool = True) -> dict[str, bytes]:
    """Return the complete files of `snapshot`; with `keep=False`, only take part in gathering."""
    buffers = HostBuffers()
    used = buffers if keep else None
    files = snapshot(training, lambda: progress, used)
    buffers.wait()
    return {name: b"".join(pieces(contents)) for name, contents in files.items()}


def _gathered(
    tensors: Mapping[str, torch.Tensor], parameters: SavedParameters, buffers: HostBuffers | None
) -> dict[str, torch.Tensor]:
    """Gather full tensors of parameters in host memory, one after another; a collective."""
    gathered = parameters.full_values({name: {"": local} for name, local in tensors.items()})
    return {name: buffers.copy(full) for name, _, full in gathered if buffers is not None}


def _pack_model(
    training: Training, buffers: HostBuffers | None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of distinct parameters and buffers, and the original of each alias."""
    parameters = training.parameters
    state = {
        name: tensor
        for name, tensor in training.model.state_dict().items()
        if not name.endswith(EXTRA_STATE)
    }
    if not parameters.is_divided:
        tensors, aliases = distinct(state)
        return _gathered(tensors, parameters, buffers), aliases
    in_model = dict(training.model.named_parameters(remove_duplicate=False))  # with tied ones
    first = {id(in_model[name]): name for name in parameters.local}
    aliases = {name: first[id(p)] for name, p in in_model.items() if first[id(p)] != name}
    of_buffers = {name: tensor for name, tensor in state.items() if name not in in_model}
    others, other_aliases = distinct(of_buffers)
    local = {name: parameter.detach() for name, parameter in parameters.local.items()}
    tensors = _gathered(local, parameters, buffers)
    if buffers is not None:
        tensors |= {name: buffers.copy(tensor) for name, tensor in others.items()}
    return {name: tensors[name] for name in state if name in tensors}, aliases | other_aliases


def _pack_optimizer(
    training: Training, others: Tensors, buffers: HostBuffers | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return copies of the tensors as `slot/name`, and other values as JSON, with `others`."""
    names = _names(training)
    state = training.optimizer.state_dict()["state"]
    shared = [[key, value] for key, value in state.items() if key not in names]
    slots: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    own = {name: state[index] for index, name in names.items() if index in state}
    for name, slot, value in training.parameters.full_values(own):
        if not isinstance(value, torch.Tensor):
            numbers.setdefault(name, {})[slot] = value
        elif buffers is not None:
            slots[f"{slot}/{name}"] = buffers.copy(value)
    values = {"numbers": numbers, "groups": _groups(training, names), "shared": shared}
    return slots, {key: encode(value, others, f"optimizer.{key}") for key, value in values.items()}


def _names(training: Training) -> dict[int, str]:
    """Return the name of each parameter by the optimizer's index."""
    by_parameter = {parameter: name for name, parameter in training.parameters.local.items()}
    optimized = [one for group in training.optimizer.param_groups for one in group["params"]]
    return {index: by_parameter[parameter] for index, parameter in enumerate(optimized)}


def _groups(training: Training, names: Mapping[int, str]) -> list[dict[str, Any]]:
    groups = training.optimizer.state_dict()["param_groups"]
    return [{**group, "params": [names[index] for index in group["params"]]} for group in groups]


# --- loading ---


def read_verified(checkpoint: Path, trainings: Mapping[str, Training]) -> dict[str, SavedState]:
    """Verify a checkpoint once, and return the states without tensors.

    Args:
        checkpoint: folder of the checkpoint.
        trainings: objects by the beginning of the names of their files.

    Raises:
        CheckpointError: the checkpoint is damaged, or has invalid contents.
    """
    files = [prefix + name for prefix in trainings for name in (MODEL, OPTIMIZER)]
    files += [
        prefix + AVERAGE for prefix, training in trainings.items() if training.average is not None
    ]
    states = read_states(checkpoint, [prefix + STATE for prefix in trainings], files)
    return {prefix: states[prefix + STATE] for prefix in trainings}


def load(checkpoint: Path, training: Training) -> Progress:
    """Verify a checkpoint and load the state into `training`.

    Raises:
        CheckpointError: the checkpoint is damaged, has invalid contents, or is of another model,
            optimizer or objects; `training` is unchanged.
    """
    saved = read_verified(checkpoint, {"": training})
    load_all(checkpoint, {"": training}, saved)
    return saved[""].progress


def load_all(
    checkpoint: Path,
    trainings: Mapping[str, Training],
    saved: Mapping[str, SavedState],
    *,
    new_objects: bool = False,
) -> None:
    """Load a verified checkpoint into all models of a loop, or into none.

    Changed settings stay as the script has made them, and with `new_objects` other objects.

    Raises:
        CheckpointError: as `load`.
    """
    with _load_errors(checkpoint), ExitStack() as undo:
        loadings = [
            _loading(checkpoint, training, saved[prefix], prefix, undo, new_objects)
            for prefix, training in trainings.items()
        ]
        # In step: all models are compared before one of them changes.
        for _ in zip(*loadings, strict=True):
            pass
        undo.pop_all()  # everything is loaded


def _loading(
    checkpoint: Path,
    training: Training,
    state: SavedState,
    prefix: str,
    undo: ExitStack,
    new_objects: bool,
) -> Iterator[None]:
    """Load a state in three parts: comparison; objects that can refuse; tensors, which fit.

    Settings that the caller has accepted stay as the script has made them.
    """
    known = set(training.objects)
    if new_objects:
        known &= set(state.objects)
    require_same_names("objects", state.objects, known)
    changed = changed_keys(state.settings, training.settings)
    parameters = training.parameters
    restore = _decoder(checkpoint, prefix, parameters)
    average: Mapping[str, torch.Tensor] = {}
    if training.average is not None:
        average = _mapped_tensors(checkpoint, prefix + AVERAGE)
        average = _fitting(average, training.average, parameters)
    tensors = _model_tensors(checkpoint, prefix, state, restore, training.model, parameters)
    restored = replace(state.optimizer, **restore(vars(state.optimizer)))
    slots = _mapped_tensors(checkpoint, prefix + OPTIMIZER)
    optimizer_state = _optimizer_state(training, slots, restored)
    objects = _saved_objects(training, state, restore)
    for value, saved_state in objects.values():
        require_loadable(value, saved_state)
    yield
    optimizer = training.optimizer
    # torch replaces the containers of an optimizer, and writes into neither; a replay does.
    groups = list(map(dict, optimizer.param_groups))
    undo.callback(optimizer.__setstate__, {"state": optimizer.state, "param_groups": groups})
    extra = {name: value for name, value in tensors.items() if name.endswith(EXTRA_STATE)}
    if extra:
        model = training.model
        before = {name: deepcopy(model.state_dict()[name]) for name in extra}
        undo.callback(model.load_state_dict, before, strict=False)
        model.load_state_dict(extra, strict=False)
    _load_objects(objects, changed, optimizer, optimizer_state, undo)
    _load_optimizer(training, optimizer_state)
    yield
    for name, tensor in average.items():
        (training.average or {})[name].copy_(tensor)
    training.model.load_state_dict(tensors)
    yield


def _saved_objects(
    training: Training, state: SavedState, restore: Callable[[Any], Any]
) -> dict[str, tuple[Any, Any]]:
    objects: dict[str, tuple[Any, Any]] = {}
    if training.scheduler is not None and state.scheduler is not None:
        objects["scheduler"] = (training.scheduler, restore(state.scheduler))
    if state.scaler:
        objects["scaler"] = (training.scaler, state.scaler)
    for name, value in training.objects.items():
        if name in state.objects:
            objects[f"object {name}"] = (value, restore(state.objects[name]))
    return objects


def _load_objects(
    objects: Mapping[str, tuple[Any, Any]],
    changed: Mapping[str, Sequence[str]],
    optimizer: torch.optim.Optimizer,
    optimizer_state: Mapping[str, Any],
    undo: ExitStack,
) -> None:
    """Load objects, and put accepted settings of the script into the state of the optimizer."""
    is_replayed = False
    for name, (value, saved_state) in objects.items():
        undo.callback(load_object, value, deepcopy(object_state(name, value)))
        if name in changed:
            is_replayed = True
            replay_schedule(value, saved_state)
        else:
            load_object(value, saved_state)
    groups = zip(optimizer_state["param_groups"], optimizer.param_groups, strict=True)
    for number, (group, own) in enumerate(groups):
        kept = changed.get(f"optimizer group {number}", [])
        if is_replayed:  # schedules set any of them
            kept = [key for key in own if key != "params"]
        group.update({key: own[key] for key in kept})


def load_model(
    checkpoint: Path,
    model: torch.nn.Module,
    parameters: SavedParameters | None = None,
    *,
    averaged: bool = False,
) -> None:
    """Verify a checkpoint and load only the weights and buffers of `model`.

    Args:
        checkpoint: folder of the checkpoint.
        model: changed in place.
        parameters: parameters on this rank; None for the complete model.
        averaged: load the moving average of the trained parameters; the checkpoint must have one.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    averages = (AVERAGE,) if averaged else ()
    parameters = parameters or SavedParameters(model)
    with _load_errors(checkpoint):
        state = read_state(checkpoint, MODEL, *averages)
        restore = _decoder(checkpoint, "", parameters)
        model.load_state_dict(_model_tensors(checkpoint, "", state, restore, model, parameters))
        if averaged:
            average = _mapped_tensors(checkpoint, AVERAGE)
            target = {
                name: parameter.detach()
                for name, parameter in parameters.local.items()
                if name in average and parameters.has(name)
            }
            for name, tensor in _fitting(average, target, parameters).items():
                target[name].copy_(tensor)


@contextmanager
def _load_errors(checkpoint: Path) -> Iterator[None]:
    """Convert the errors of objects that cannot load their state.

    Raises:
        CheckpointError: the state belongs to other objects, or was forged.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the files
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {type(error).__name__}: {error}",
            expected="the state of the same model, optimizer, schedule and objects",
            fix="build the objects of the run that wrote the checkpoint; do not load files of "
            "unknown origin",
            code="E_CHECKPOINT",
        ) from error


def _decoder(checkpoint: Path, prefix: str, parameters: SavedParameters) -> Callable[[Any], Any]:
    """Return a function that restores encoded values, with the tensors of the checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    if prefix + OTHERS in file_names(checkpoint):
        mapped = _mapped_tensors(checkpoint, prefix + OTHERS)
        tensors = {name: tensor.clone() for name, tensor in mapped.items()}  # objects may keep them
    devices = [p.device for p in parameters.local.values() if not p.is_meta]
    return partial(decode, tensors=tensors, device=[*devices, torch.device("cpu")][0])


def _mapped_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapped file, to be copied: only parts that are used are read."""
    try:
        return load_file(checkpoint / name)
    except SafetensorError as error:
        raise invalid_contents(checkpoint / name, str(error)) from error


def _fitting(
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    parameters: SavedParameters,
) -> dict[str, torch.Tensor]:
    """Return this rank's parts of full tensors, which fit into `target`."""
    own = {name: tensor for name, tensor in source.items() if parameters.has(name)}
    parts = {name: parameters.local_part(name, tensor) for name, tensor in own.items()}
    if target.keys() != parts.keys() or not all(_fits(parts[name], target[name]) for name in parts):
        raise ValueError("the weights belong to other parameters")
    return parts


def _fits(saved: Any, current: torch.Tensor) -> bool:
    is_tensor = isinstance(saved, torch.Tensor)
    return is_tensor and saved.shape == current.shape and saved.dtype == current.dtype


def _model_tensors(
    checkpoint: Path,
    prefix: str,
    state: SavedState,
    restore: Callable[[Any], Any],
    model: torch.nn.Module,
    parameters: SavedParameters,
) -> dict[str, Any]:
    """Return the state of a model of a checkpoint, which fits to `model`."""
    saved: dict[str, Any] = dict(_mapped_tensors(checkpoint, prefix + MODEL))
    for name, tensor in saved.items():
        if name in parameters.local:
            saved[name] = parameters.local_part(name, tensor)
    saved |= {name: saved[original] for name, original in state.aliases.items()}
    saved |= restore(state.extra)
    expected = model.state_dict()
    fitting = {
        name
        for name, value in saved.items()
        if name in expected and (name.endswith(EXTRA_STATE) or _fits(value, expected[name]))
    }
    wrong = [name for name in expected if name not in fitting]
    unknown = [name for name in saved if name not in expected]
    if wrong or unknown:
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(wrong)} tensors missing or of another shape "
            f"or type ({', '.join(wrong[:3]) or '-'}), {len(unknown)} unknown "
            f"({', '.join(unknown[:3]) or '-'})",
            expected="names and shapes of the model",
            fix="build the trained model, or load matching weights with model.pretrained",
            code="E_RESUME_CHANGED",
        )
    return saved


def _optimizer_state(
    training: Training, slots: Mapping[str, torch.Tensor], saved: SavedOptimizer
) -> dict[str, Any]:
    """Return the state of an optimizer from tensors by `slot/name` and other values."""
    names = _names(training)
    parameters = training.parameters
    groups = groups_like(saved.groups, _groups(training, names))
    index = {name: i for i, name in names.items()}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in slots.items():
        slot, _, name = key.partition("/")
        tensors.setdefault(name, {})[slot] = tensor
    unknown = [name for name in [*tensors, *saved.numbers] if name not in index]
    if unknown:
        raise other_state("optimizer", f"it trained {unknown[0]!r}")
    state: dict[int, dict[str, Any]] = {}
    for group in groups:
        for name in group["params"]:
            own = tensors.get(name, {})
            numbers = saved.numbers.get(name, {})
            if (own or numbers) and parameters.has(name):
                local = {slot: parameters.local_part(name, tensor) for slot, tensor in own.items()}
                state[index[name]] = {**local, **numbers}
        group["params"] = [index[name] for name in group["params"]]
    return {"state": state | dict(saved.shared), "param_groups": groups}


def _load_optimizer(training: Training, saved: dict[str, Any]) -> None:
    optimizer = training.optimizer
    optimizer.load_state_dict(saved)
    for index, name in _names(training).items():
        if index not in saved["state"]:
            continue
        loaded = optimizer.state[training.parameters.local[name]]
        for slot, value in saved["state"][index].items():
            # torch converts tensors to the type of the parameter, and text to a description. A
            # tensor that needs no conversion remains part of the mapped file.
            if not isinstance(value, torch.Tensor):
                loaded[slot] = value
            elif loaded[slot].dtype != value.dtype or loaded[slot].data_ptr() == value.data_ptr():
                loaded[slot] = value.to(loaded[slot].device, copy=True)
