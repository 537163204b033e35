"""Contents of a checkpoint's JSON files, which are checked when a file is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt

from samestep.errors import CheckpointError
from samestep.microbatches import Cursor

if TYPE_CHECKING:
    from pydantic import TypeAdapter


Kind = TypeVar("Kind")
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
    loss_sum: _Finite = 0.0  # sum of the losses of the current epoch so far
    loss_count: Annotated[float, Ge(0), Lt(math.inf)] = 0.0  # divisor for the mean of the epoch
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


def parse(kind: type[Kind], data: bytes, path: Path) -> Kind:
    """Return the contents of a JSON file.

    Raises:
        CheckpointError: the data are no JSON, or a value has another type or is out of range.
    """
    # Lazy: a program that reads no checkpoint does not need the package.
    from pydantic import ValidationError

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
