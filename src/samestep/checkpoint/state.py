"""State of a training run as checkpoint files: tensors as safetensors, other state as JSON.

The files do not depend on the number of ranks: names are the model's own, the position is a cursor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.compatibility import IMPLEMENTATION_FLAGS, like_current, require_slots, trial_state
from samestep.checkpoint.contents import Progress, SavedOptimizer, contents_errors, invalid_contents
from samestep.checkpoint.store import STATE, read_state
from samestep.errors import CheckpointError
from samestep.launcher.job import process_state

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"


class SavedParameters(Protocol):
    """Parameters of a model on this rank. The methods of this class are those of a rank with the complete model.

    Attributes:
        local: local part of each parameter, as the optimizer has it, by the model's names.
        is_divided: some parameters are divided among ranks; then every rank packs, and gathering is a collective.
    """

    local: dict[str, torch.nn.Parameter]
    is_divided: bool

    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return a full parameter, or an element-wise state of the parameter, from all local parts. A collective."""
        return local

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor; a tensor of another shape than the parameter's is unchanged."""
        return full

    def merge_metadata(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Return the values of all parameters on all ranks in the same order. A collective.

        Numbers of other ranks are included; tensors of other ranks have no values until `full_tensor`.
        """
        return values


class _CompleteModel(SavedParameters):
    def __init__(self, model: torch.nn.Module) -> None:
        self.local, self.is_divided = dict(model.named_parameters()), False


@dataclass(frozen=True)
class Training:
    """Objects with state in a checkpoint.

    Attributes:
        average: moving average of the trained parameters by name, set in place; None if unused.
        local_parameters: parameters on this rank; None for the complete model.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    average: dict[str, torch.Tensor] | None = None
    local_parameters: SavedParameters | None = None

    @cached_property
    def parameters(self) -> SavedParameters:
        """Parameters on this rank."""
        return self.local_parameters or _CompleteModel(self.model)


def pack(training: Training, progress: Progress, *, keep: bool = True) -> dict[str, bytes]:
    """Return the files of a checkpoint by name, the same under every strategy.

    With `keep=False`, the rank only takes part in gathering, and the result is empty.
    """
    parameters = training.parameters
    if not (keep or parameters.is_divided):
        return {}  # nothing to gather
    tensors, aliases = _pack_model(training, keep=keep)
    slots, optimizer = _pack_optimizer(training, keep=keep)
    average = None if training.average is None else _gathered(training.average, parameters, keep=keep)
    if not keep:
        return {}
    process_state.source_files.note_imports()
    state = {
        "progress": asdict(progress),
        "aliases": aliases,
        "optimizer": optimizer,
        "scheduler": training.scheduler.state_dict() if training.scheduler else None,
        "scaler": training.scaler.state_dict(),
        "sources": process_state.source_files.hashes,
    }
    files = {MODEL: save(tensors), OPTIMIZER: save(slots), STATE: json.dumps(state, indent=1).encode()}
    if average is not None:
        files[AVERAGE] = save(average)
    return files


def load(checkpoint: Path, training: Training) -> Progress:
    """Verify a checkpoint and load the state into `training`.

    Raises:
        CheckpointError: the checkpoint is damaged, has invalid contents, or is of another model or optimizer.
    """
    averages = (AVERAGE,) if training.average is not None else ()
    state = read_state(checkpoint, MODEL, OPTIMIZER, *averages)
    with contents_errors(checkpoint):
        if training.average is not None:
            _copy(_read_tensors(checkpoint, AVERAGE), training.average, training.parameters)
        slots = _read_tensors(checkpoint, OPTIMIZER)
        shapes = _load_model(checkpoint, state.aliases, training.model, training.parameters)
        _load_optimizer(training, slots, state.optimizer, shapes)
        if training.scheduler is not None and state.scheduler is not None:
            schedule = like_current(state.scheduler, training.scheduler.state_dict(), "scheduler")
            training.scheduler.load_state_dict(schedule)
        if state.scaler:
            training.scaler.load_state_dict(like_current(state.scaler, training.scaler.state_dict(), "scaler"))
    return state.progress


def load_model(
    checkpoint: Path, model: torch.nn.Module, parameters: SavedParameters | None = None, *, averaged: bool = False
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
    averages, parameters = (AVERAGE,) if averaged else (), parameters or _CompleteModel(model)
    with contents_errors(checkpoint):
        _load_model(checkpoint, read_state(checkpoint, MODEL, *averages).aliases, model, parameters)
        if averaged:
            average = _read_tensors(checkpoint, AVERAGE)
            _copy(average, {n: p.detach() for n, p in parameters.local.items() if n in average}, parameters)


def _read_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(checkpoint / name)
    except SafetensorError as error:
        raise invalid_contents(checkpoint / name, str(error)) from error


def _gathered(
    tensors: Mapping[str, torch.Tensor], parameters: SavedParameters, *, keep: bool
) -> dict[str, torch.Tensor]:
    """Gather full tensors of parameters one after another, in host memory; every rank takes part."""
    gathered = ((name, parameters.full_tensor(name, local)) for name, local in tensors.items())
    return {name: full.cpu().contiguous().clone() for name, full in gathered if keep}


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], parameters: SavedParameters) -> None:
    """Copy this rank's parts of full tensors into `target`, in place; raise `ValueError` unless they fit."""
    parts = {name: parameters.local_part(name, tensor) for name, tensor in source.items()}
    if {name: _kind(tensor) for name, tensor in target.items()} != {name: _kind(part) for name, part in parts.items()}:
        raise ValueError("the weights belong to other parameters")
    for name, tensor in target.items():
        tensor.copy_(parts[name])


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _pack_model(training: Training, *, keep: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return distinct parameters and buffers, and the name of the original for each alias (tied weights)."""
    state, parameters = training.model.state_dict(), training.parameters
    if not parameters.is_divided:
        return _distinct(state)
    in_model = dict(training.model.named_parameters(remove_duplicate=False))
    first = {id(in_model[name]): name for name in parameters.local}
    aliases = {name: first[id(p)] for name, p in in_model.items() if first[id(p)] != name}
    buffers, buffer_aliases = _distinct({name: tensor for name, tensor in state.items() if name not in in_model})
    gathered = _gathered({name: p.detach() for name, p in parameters.local.items()}, parameters, keep=keep)
    tensors = gathered | buffers
    return {name: tensors[name] for name in state if name in tensors}, aliases | buffer_aliases


def _distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of distinct tensors, and the name of the original for each alias."""
    first: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], str] = {}
    distinct: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        # Empty tensors share an address.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor.detach().cpu().contiguous().clone()
    return distinct, aliases


def _load_model(
    checkpoint: Path, aliases: Mapping[str, str], model: torch.nn.Module, parameters: SavedParameters
) -> dict[str, torch.Size]:
    """Load weights and buffers, and return the shapes of the complete tensors."""
    tensors = _read_tensors(checkpoint, MODEL)
    for name, original in aliases.items():
        tensors[name] = tensors[original]
    expected = model.state_dict()
    wrong = [name for name in expected if name not in tensors or _kind(tensors[name]) != _kind(expected[name])]
    unknown = [name for name in tensors if name not in expected]
    if wrong or unknown:
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(wrong)} tensors missing or of another shape or type "
            f"({', '.join(wrong[:3]) or '-'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or '-'})",
            expected="names and shapes of the model",
            fix="build the trained model, or load matching weights of another one with model.pretrained",
            code="E_CHECKPOINT_MODEL",
        )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if not parameters.is_divided:
        model.load_state_dict(tensors)
        return shapes
    in_model = dict(model.named_parameters(remove_duplicate=False))
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in in_model}, strict=False)
    local = parameters.local
    _copy({name: tensors[name] for name in local}, {name: p.detach() for name, p in local.items()}, parameters)
    return shapes


def _pack_optimizer(training: Training, *, keep: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of the optimizer as `slot/name`, and numbers and parameter groups by parameter name."""
    names, state = _names(training), training.optimizer.state_dict()["state"]
    slots: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    by_name = {names[index]: values for index, values in state.items()}
    for name, values in training.parameters.merge_metadata(by_name).items():
        for slot, value in values.items():
            if isinstance(value, torch.Tensor):
                full = training.parameters.full_tensor(name, value.detach())
                if keep:
                    slots[f"{slot}/{name}"] = full.cpu().contiguous()
            else:
                numbers.setdefault(name, {})[slot] = value
    return slots, {"numbers": numbers, "groups": _groups(training, names)}


def _load_optimizer(
    training: Training, slots: Mapping[str, torch.Tensor], saved: SavedOptimizer, shapes: Mapping[str, torch.Size]
) -> None:
    names, parameters = _names(training), training.parameters
    groups = _groups(training, names)
    if [set(group) for group in groups] != [set(group) for group in saved.groups]:
        raise _other_optimizer("its settings are those of another optimizer, or of other parameter groups")
    if [group["params"] for group in groups] != [group["params"] for group in saved.groups]:
        raise _other_optimizer("it trained other parameters")
    # How a step is computed depends on the machine.
    implementation = [{flag: group[flag] for flag in IMPLEMENTATION_FLAGS if flag in group} for group in groups]
    groups = [
        {**group, **flags}
        for group, flags in zip(like_current(saved.groups, groups, "groups"), implementation, strict=True)
    ]
    index = {name: i for i, name in names.items()}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in slots.items():
        slot, _, name = key.partition("/")
        tensors.setdefault(name, {})[slot] = tensor
    unknown = [name for name in [*tensors, *saved.numbers] if name not in index]
    if unknown:
        raise _other_optimizer(f"it trained {unknown[0]!r}")
    state: dict[int, dict[str, Any]] = {}
    for group in groups:
        dimensions = {len(shapes[name]) for name in group["params"] if name in shapes}
        trials = {number: trial_state(training.optimizer, group, number) for number in dimensions}
        for name in group["params"]:
            own, numbers = tensors.get(name, {}), saved.numbers.get(name, {})
            if not (own or numbers):
                continue
            expected = trials[len(shapes[name])] if name in shapes else None
            if expected is not None:
                require_slots(expected, shapes[name], own, numbers, name)
            if not parameters.local[name].is_meta:  # not of another rank
                local = {slot: parameters.local_part(name, tensor) for slot, tensor in own.items()}
                state[index[name]] = {**local, **numbers}
        group["params"] = [index[name] for name in group["params"]]
    training.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _other_optimizer(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state does not match: {problem}",
        expected="the optimizer and the parameter groups of the checkpoint",
        fix="start a new run from these weights",
        code="E_CHECKPOINT_OPTIMIZER",
    )


def _groups(training: Training, names: Mapping[int, str]) -> list[dict[str, Any]]:
    groups = training.optimizer.state_dict()["param_groups"]
    return [{**group, "params": [names[index] for index in group["params"]]} for group in groups]


def _names(training: Training) -> dict[int, str]:
    """Return the name of each parameter by the optimizer's index."""
    by_parameter = {parameter: name for name, parameter in training.parameters.local.items()}
    optimized = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    return {i: by_parameter[parameter] for i, parameter in enumerate(optimized)}
