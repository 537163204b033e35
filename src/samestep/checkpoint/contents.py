"""Contents of a checkpoint's JSON files, checked when a file is read, and its manifest: SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt

from samestep.checkpoint.files import Contents, pieces
from samestep.errors import CheckpointError
from samestep.microbatches import Cursor

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MANIFEST = "manifest.json"
_FORMAT = 2
Kind = TypeVar("Kind")
_Count = Annotated[int, Ge(0), Le(2**62)]
_Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]


class _Strict:
    """Base class of contents without unknown keys."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class SavedFile(_Strict):
    """Entry of a file in the manifest."""

    bytes: _Count
    sha256: Annotated[str, Len(64, 64)]


@dataclass(frozen=True)
class Manifest(_Strict):
    """Files of a checkpoint by name."""

    format: int
    files: dict[str, SavedFile]


@dataclass(frozen=True)
class SavedLoader(_Strict):
    """Position of a loader, and the settings on which its batches depend."""

    cursor: Cursor
    settings: dict[str, Any]


@dataclass(frozen=True)
class Progress(_Strict):
    """Progress of a run, without tensors."""

    step: _Count  # completed optimizer steps
    cursor: Cursor = field(default_factory=Cursor)  # position in the data
    best: float | None = None  # best value of the monitored metric so far, or None
    loss_sum: _Finite = 0.0  # sum of the losses of the current epoch so far
    loss_count: Annotated[float, Ge(0), Lt(math.inf)] = (
        0.0  # divisor of `loss_sum` for the mean of the epoch
    )
    skipped_steps: _Count = 0  # steps without an update, because loss or gradient was not finite
    recipe: dict[str, Any] = field(default_factory=dict)  # resolved recipe
    data: dict[str, Any] = field(default_factory=dict)  # settings of the training data of a recipe
    # Of own loops:
    loaders: dict[str, SavedLoader] = field(
        default_factory=dict
    )  # by name; the name of a single one is empty


@dataclass(frozen=True)
class SavedOptimizer(_Strict):
    """State of an optimizer without tensors; `encode` describes the values."""

    numbers: dict[str, dict[str, Any]]  # by name of the parameter, then by slot
    groups: list[dict[str, Any]]
    shared: list[Any] = field(
        default_factory=list
    )  # pairs of key and value that belong to no parameter


@dataclass(frozen=True)
class SavedState(_Strict):
    """Contents of `state.json`."""

    progress: Progress
    aliases: dict[str, str]  # name of the saved tensor by the name of an alias (tied weights)
    optimizer: SavedOptimizer
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any]
    sources: dict[str, Annotated[str, Len(64, 64)]] = field(
        default_factory=dict
    )  # SHA-256 of the user's modules
    extra: dict[str, Any] = field(default_factory=dict)  # extra state of modules by name
    objects: dict[str, Any] = field(default_factory=dict)  # state of other objects by name


def parse(kind: type[Kind], data: bytes, path: Path) -> Kind:
    """Return the contents of a JSON file.

    Raises:
        CheckpointError: the data are no JSON, or a value has another type or is out of range.
    """
    from pydantic import (
        ValidationError,
    )  # lazy: a program that reads no checkpoint does not need the package

    try:
        contents: Kind = validator_of(kind).validate_json(data, strict=True)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise invalid_contents(
            path, f"{where}: {first['msg']}" if where else first["msg"]
        ) from error
    return contents


def invalid_contents(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file that matches its manifest but has contents that Samestep does not write."""
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


def verify(checkpoint: Path, *names: str) -> None:
    """Verify every file of a checkpoint, including `names`, against the manifest.

    Raises:
        CheckpointError: a file is missing, a link, outside the folder, unreadable, or has another
            length or hash; or the manifest itself is damaged.
    """
    files = _read_manifest(checkpoint)
    missing = [name for name in names if name not in files]
    if missing:
        raise damaged(checkpoint / missing[0], "is not in the manifest")
    for name, entry in files.items():
        try:
            _verify_file(checkpoint / name, entry)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise damaged(checkpoint / name, f"cannot be read: {error}") from error


def file_names(checkpoint: Path) -> set[str]:
    """Return the names of the files in the manifest.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    return set(_read_manifest(checkpoint))


def damaged(path: Path, problem: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(
        f"{path} {problem}",
        expected="a complete checkpoint, verified before any part is loaded",
        fix="resume from another one: --checkpoint best, or --checkpoint STEP",
        code="E_CHECKPOINT",
    )


def build_manifest(files: Mapping[str, Contents]) -> bytes:
    """Return the manifest of files with these contents."""
    manifest = {
        "format": _FORMAT,
        "files": {name: _entry(contents) for name, contents in files.items()},
    }
    manifest["sha256"] = _digest(manifest)
    return json.dumps(manifest, indent=1).encode()


def _entry(contents: Contents) -> dict[str, object]:
    digest = hashlib.sha256()
    size = 0
    for piece in pieces(contents):
        digest.update(piece)
        size += len(piece)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _read_manifest(checkpoint: Path) -> dict[str, SavedFile]:
    """Return length and hash by file name."""
    path = checkpoint / MANIFEST
    try:
        if not path.is_file() or path.is_symlink():
            raise damaged(path, "is missing")
        manifest = json.loads(path.read_bytes())
        digest = manifest.pop("sha256")
        is_unchanged = digest == _digest(manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if not is_unchanged:
        raise damaged(path, "was changed: its SHA-256 differs")
    if manifest.get("format") != _FORMAT:
        raise invalid_contents(path, f"its format is {manifest.get('format')}, not {_FORMAT}")
    files = parse(Manifest, json.dumps(manifest).encode(), path).files
    for name in files:
        # A name with a folder part could point outside the checkpoint.
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise invalid_contents(path, f"{name!r} is not the name of a file")
    return files


def _verify_file(path: Path, entry: SavedFile) -> None:
    if path.is_symlink() or not path.is_file():
        raise damaged(path, "is missing, or a link")
    size = path.stat().st_size
    if size != entry.bytes:
        raise damaged(path, f"has {size} bytes instead of {entry.bytes}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
            raise damaged(path, "was changed: its SHA-256 differs")


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
