"""Contents of a checkpoint: objects with state, and JSON files, which are checked when read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt

from samestep.cursor import Cursor
from samestep.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from pydantic import TypeAdapter
    from torch.optim.lr_scheduler import LRScheduler


Kind = TypeVar("Kind")
Values = Mapping[str, Mapping[str, Any]]
Count = Annotated[int, Ge(0), Le(2**62)]
_Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]


class Strict:
    """Base class of contents without unknown keys."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class SavedLoader(Strict):
    """Position of a loader, and the settings on which its batches depend."""

    cursor: Cursor
    settings: dict[str, Any]
    probe: dict[str, Any] | None = None  # hashes of some samples, and how they were read


@dataclass(frozen=True)
class Progress(Strict):
    """Progress of a run, without tensors."""

    step: Count  # completed optimizer steps
    cursor: Cursor = field(default_factory=Cursor)  # position in the data
    best: float | None = None  # best value of the monitored metric so far, or None
    best_epoch: Count = 0  # epochs before the evaluation with the best value
    loss_sum: _Finite = 0.0  # sum of the losses of the current epoch so far
    loss_count: Annotated[float, Ge(0), Lt(math.inf)] = 0.0  # divisor for the mean of the epoch
    # Correct and counted targets of the current epoch so far, for each accuracy.
    hits: list[tuple[_Finite, _Finite]] = field(default_factory=list)
    skipped_steps: Count = 0  # steps without an update, because loss or gradient was not finite
    recipe: dict[str, Any] = field(default_factory=dict)  # resolved recipe
    data: dict[str, Any] = field(default_factory=dict)  # settings of the training data of a recipe
    # Of loops of scripts, by name; the name of a single one is empty.
    loaders: dict[str, SavedLoader] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)  # on which rounding depends


@dataclass(frozen=True)
class SavedOptimizer(Strict):
    """State of an optimizer without tensors; `encode` describes the values."""

    numbers: dict[str, dict[str, Any]]  # by name of the parameter, then by slot
    groups: list[dict[str, Any]]
    shared: list[Any] = field(default_factory=list)  # pairs of key and value, of no parameter


@dataclass(frozen=True)
class SavedState(Strict):
    """Contents of `state.json`."""

    progress: Progress
    aliases: dict[str, str]  # name of the saved tensor by the name of an alias (tied weights)
    optimizer: SavedOptimizer
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any]
    # SHA-256 of the user's modules.
    sources: dict[str, Annotated[str, Len(64, 64)]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # extra state of modules by name
    objects: dict[str, Any] = field(default_factory=dict)  # state of other objects by name
    # Of optimizer and schedules, as the script made them.
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)  # values or hashes, for comparison


class SavedParameters:
    """Parameters of a model that this rank has completely; subclasses divide them among ranks.

    Attributes:
        local: local part of each parameter, as the optimizer has it, by the model's names.
        is_divided: some parameters are divided among ranks; then every rank packs, and gathering is
            a collective.
    """

    is_divided = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.local = dict(model.named_parameters())

    def has(self, name: str) -> bool:
        """Whether this rank has a parameter, or a part of it."""
        return True

    def full_values(self, values: Values) -> Iterator[tuple[str, str, Any]]:
        """Yield name, slot and full value of parameters and their state. A collective.

        Args:
            values: values of this rank by name and slot: local parts of parameters, element-wise
                state, and others.
        """
        for name, slots in values.items():
            for slot, value in slots.items():
                yield name, slot, value

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor; one of another shape stays as it is."""
        return full


@dataclass(frozen=True)
class Training:
    """Objects with state in a checkpoint.

    Attributes:
        average: moving average of the trained parameters by name, set in place; None if unused.
        local_parameters: parameters on this rank; None for the complete model.
        objects: other objects by name: with `state_dict` and `load_state_dict`, generators of
            torch, and dicts.
        settings: settings of optimizer and schedules as the script made them (`settings_of`).
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler
    average: dict[str, torch.Tensor] | None = None
    local_parameters: SavedParameters | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> SavedParameters:
        """Parameters on this rank."""
        return self.local_parameters or SavedParameters(self.model)

    @property
    def named_objects(self) -> dict[str, Any]:
        """The model and the other objects, by names that do not hide one another."""
        return {"model": self.model} | {f"object {name}": one for name, one in self.objects.items()}


def parse(kind: type[Kind], data: bytes, path: Path) -> Kind:
    """Return the contents of a JSON file.

    Raises:
        CheckpointError: the data are no JSON, or a value has another type or is out of range.
    """
    # Lazy: a program that reads no checkpoint does not need the package.
    from pydantic import ValidationError

    # Strict: "3" is no number.
    validator = validator_of(kind)  # type: ignore[arg-type]  # a class is hashable
    try:
        contents: Kind = validator.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        problem = first["msg"]
        if where := ".".join(map(str, first["loc"])):
            problem = f"{where}: {problem}"
        raise invalid_contents(path, problem) from error
    return contents


def invalid_contents(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file with contents that Samestep does not write."""
    return CheckpointError(
        f"{path} has invalid contents: {problem}",
        expected="tensors as safetensors, other state as JSON, in the format of this version",
        fix="resume from a checkpoint of this version; do not load files of unknown origin",
        code="E_CHECKPOINT",
    )


@cache
def validator_of(kind: type[object]) -> TypeAdapter[Any]:
    """Return the validator of a dataclass; building it takes 10 ms for a recipe."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
