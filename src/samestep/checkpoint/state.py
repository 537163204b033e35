"""The state of a run as files: tensors as safetensors, the rest as JSON.

Nothing in it knows how many ranks wrote it: names are the model's own, the position is a cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.holding import Holding, WholeModel, gathered
from samestep.checkpoint.manifest import STATE, foreign, read_json
from samestep.cursor import Cursor
from samestep.errors import CheckpointError

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, besides what is in tensors.

    Attributes:
        step: optimizer steps done.
        cursor: position in the data.
        best: the best value of the deciding metric so far, or None.
        loss_sum: summed loss of the current epoch so far.
        loss_count: what it is divided by for the epoch's mean.
        recipe: the resolved recipe that led here.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    best: float | None = None
    loss_sum: float = 0.0
    loss_count: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The objects whose state a checkpoint holds.

    Attributes:
        average: a moving average of trained parameters by name, set in place; None where there is none.
        parts: what of the model is on this rank; None for all of it.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    average: dict[str, torch.Tensor] | None = None
    parts: Holding | None = None

    @cached_property
    def holding(self) -> Holding:
        """What of the model is on this rank."""
        return self.parts or WholeModel(self.model)


def pack(training: Training, progress: Progress, *, keep: bool = True) -> dict[str, bytes]:
    """The files of a checkpoint, by name; the same under every layout.

    Args:
        keep: False on a rank that only takes part in gathering; it gets nothing.
    """
    holding = training.holding
    if not (keep or holding.is_divided):
        return {}  # nothing is gathered
    tensors, aliases = _pack_model(training, keep=keep)
    slots, numbers, groups = _pack_optimizer(training, keep=keep)
    average = None
    if training.average is not None:
        average = gathered(training.average, holding, keep=keep)
    if not keep:
        return {}
    state = {
        "progress": asdict(progress),
        "aliases": aliases,
        "optimizer": {"numbers": numbers, "groups": groups},
        "scheduler": training.scheduler.state_dict() if training.scheduler else None,
        "scaler": training.scaler.state_dict(),
    }
    files = {
        MODEL: save(tensors),
        OPTIMIZER: save(slots),
        STATE: json.dumps(state, indent=1).encode(),
    }
    if average is not None:
        files[AVERAGE] = save(average)
    return files


def load(checkpoint: Path, training: Training) -> Progress:
    """Set `training` to what a checkpoint says, after verifying it.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or optimizer, or was not written here.
    """
    averages = (AVERAGE,) if training.average is not None else ()
    state = read_json(checkpoint, STATE, MODEL, OPTIMIZER, *averages)
    with _read_as_written(checkpoint):
        if training.average is not None:
            _set(training.average, _tensors(checkpoint, AVERAGE), training.holding)
        progress = _progress(state)
        slots = _tensors(checkpoint, OPTIMIZER)
        _load_model(checkpoint, state["aliases"], training.model, training.holding)
        _load_optimizer(training, slots, state["optimizer"])
        if training.scheduler is not None and state["scheduler"] is not None:
            training.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:
            training.scaler.load_state_dict(state["scaler"])
    return progress


def load_model(
    checkpoint: Path, model: torch.nn.Module, parts: Holding | None = None, *, averaged: bool = False
) -> None:
    """Set the weights and buffers of `model` alone, after verifying the checkpoint.

    Args:
        parts: what of the model is on this rank; None for all of it.
        averaged: the trained parameters are those of the moving average, which the checkpoint must have.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    averages, holding = (AVERAGE,) if averaged else (), parts or WholeModel(model)
    with _read_as_written(checkpoint):
        _load_model(checkpoint, read_json(checkpoint, STATE, MODEL, *averages)["aliases"], model, holding)
        if averaged:
            average = _tensors(checkpoint, AVERAGE)
            _set({name: p.detach() for name, p in holding.held.items() if name in average}, average, holding)


@contextmanager
def _read_as_written(checkpoint: Path) -> Iterator[None]:
    """A checkpoint whose files fit its manifest can still hold what nobody here has written."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise foreign(checkpoint, f"{type(error).__name__}: {error}") from error


def _tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(checkpoint / name)
    except SafetensorError as error:
        raise foreign(checkpoint / name, str(error)) from error


def _load_model(checkpoint: Path, aliases: Mapping[str, str], model: torch.nn.Module, holding: Holding) -> None:
    tensors = _tensors(checkpoint, MODEL)
    for name, source in aliases.items():
        tensors[name] = tensors[source]
    expected = model.state_dict()
    wrong = [name for name in expected if name not in tensors or tensors[name].shape != expected[name].shape]
    unknown = [name for name in tensors if name not in expected]
    if wrong or unknown:
        raise CheckpointError(
            f"{checkpoint} is of another model: {len(wrong)} tensors missing or of another shape "
            f"({', '.join(wrong[:3]) or '-'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or '-'})",
            rule="names and shapes of a checkpoint are those of the model",
            do="build the model that was trained; model.pretrained takes what matches of another one",
        )
    if not holding.is_divided:
        model.load_state_dict(tensors)
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in parameters}, strict=False)
    _set({name: held.detach() for name, held in holding.held.items()}, {n: tensors[n] for n in holding.held}, holding)


def _set(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], holding: Holding) -> None:
    """Set in place what this rank has of parameters.

    Raises:
        ValueError: names or shapes are not the same.
    """
    parts = {name: holding.part(name, tensor) for name, tensor in given.items()}
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in parts.items()}:
        raise ValueError("the weights are of other parameters")
    for name, tensor in own.items():
        tensor.copy_(parts[name])


def _pack_model(training: Training, *, keep: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers without repetition, and the names that stand for another one's tensor (tied weights)."""
    state, holding = training.model.state_dict(), training.holding
    if not holding.is_divided:
        return _distinct(state)
    own = dict(training.model.named_parameters(remove_duplicate=False))
    first = {id(own[name]): name for name in holding.held}
    aliases = {name: first[id(p)] for name, p in own.items() if first[id(p)] != name}
    buffers, more = _distinct({name: tensor for name, tensor in state.items() if name not in own})
    whole = gathered({name: held.detach() for name, held in holding.held.items()}, holding, keep=keep)
    return {name: (whole | buffers)[name] for name in state if name in whole or name in buffers}, aliases | more


def _distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors without repetition, and the names that stand for another one's tensor (tied weights)."""
    first: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], str] = {}
    distinct: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        # A tensor without elements has no address of its own.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor.detach().cpu().contiguous().clone()
    return distinct, aliases


def _pack_optimizer(
    training: Training, *, keep: bool
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Optimizer state by parameter name: tensors as `slot/name`, numbers, and the groups' settings."""
    names = _names(training)
    state = training.optimizer.state_dict()
    slots: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    mine = {names[index]: values for index, values in state["state"].items()}
    for name, values in training.holding.everywhere(mine).items():
        for slot, value in values.items():
            if isinstance(value, torch.Tensor):
                whole = training.holding.whole(name, value.detach())
                if keep:
                    slots[f"{slot}/{name}"] = whole.cpu().contiguous()
            else:
                numbers.setdefault(name, {})[slot] = value
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return slots, numbers, groups


def _load_optimizer(training: Training, slots: Mapping[str, torch.Tensor], said: Mapping[str, Any]) -> None:
    index = {name: i for i, name in _names(training).items()}
    _require_same_optimizer(training, said["groups"])
    state: dict[int, dict[str, Any]] = {}
    elsewhere = {name for name, held in training.holding.held.items() if held.is_meta}
    for key, tensor in slots.items():
        slot, _, name = key.partition("/")
        if name not in elsewhere:
            state.setdefault(index[name], {})[slot] = training.holding.part(name, tensor)
    for name, values in said["numbers"].items():
        if name not in elsewhere:
            state.setdefault(index[name], {}).update(values)
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in said["groups"]]
    training.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _require_same_optimizer(training: Training, said: list[dict[str, Any]]) -> None:
    names = _names(training)
    own = training.optimizer.state_dict()["param_groups"]
    own = [{**group, "params": [names[i] for i in group["params"]]} for group in own]
    if [set(group) for group in own] != [set(group) for group in said]:
        what = "its settings are those of another optimizer, or of other parameter groups"
    elif [group["params"] for group in own] != [group["params"] for group in said]:
        what = "it trained other parameters"
    else:
        return
    raise CheckpointError(
        f"the optimizer's state does not fit: {what}",
        rule="a run goes on with the optimizer that it began with",
        do="start a new run from these weights",
    )


def _names(training: Training) -> dict[int, str]:
    """The name of each of the optimizer's parameters, by the number its state dict gives it."""
    by_parameter = {parameter: name for name, parameter in training.holding.held.items()}
    held = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    return {i: by_parameter[parameter] for i, parameter in enumerate(held)}


def _progress(state: Mapping[str, Any]) -> Progress:
    said = dict(state["progress"])
    return Progress(**{**said, "cursor": Cursor(**said["cursor"])})
