"""The manifest of a checkpoint: what was written, so that nothing else is ever read.

It holds length and SHA-256 of every file, and the SHA-256 of itself. That tells damage from what was written; it is no
signature: who can write to the folder can write a manifest that fits. So nothing that is read here can run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError

MANIFEST, STATE = "manifest.json", "state.json"
_FORMAT = 1


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """The manifest of files with this content."""
    sums = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = {"format": _FORMAT, "files": sums}
    manifest["sha256"] = _digest(manifest)
    return json.dumps(manifest, indent=1).encode()


def verify(checkpoint: Path, *names: str) -> None:
    """Check that every file of a checkpoint, `names` among them, is the one that was written.

    Raises:
        CheckpointError: a file is missing, has another length or another hash, cannot be read, is a link or lies
            elsewhere, or the manifest itself is damaged.
    """
    files = _read_manifest(checkpoint)
    missing = [name for name in names if name not in files]
    if missing:
        raise damaged(checkpoint / missing[0], "is not in the manifest")
    for name, said in files.items():
        try:
            _require_as_written(checkpoint / name, said)
        except OSError as error:
            raise damaged(checkpoint / name, f"cannot be read: {error.strerror}") from error


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint can be verified."""
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def read_json(checkpoint: Path, name: str, *others: str) -> dict[str, Any]:
    """A JSON object of a checkpoint, after verifying all of it, `others` being part of it.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file holds something else.
    """
    verify(checkpoint, name, *others)
    try:
        said = json.loads((checkpoint / name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise foreign(checkpoint / name, f"{type(error).__name__}: {error}") from error
    if not isinstance(said, dict):
        raise foreign(checkpoint / name, f"a {type(said).__name__} in the place of an object")
    return said


def read_origin(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """The step of a checkpoint and the resolved recipe that led to it, after verifying all of it.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds something else.
    """
    state = read_json(checkpoint, STATE)
    try:
        return int(state["progress"]["step"]), dict(state["progress"]["recipe"])
    except (KeyError, TypeError, ValueError) as error:
        raise foreign(checkpoint / STATE, f"{type(error).__name__}: {error}") from error


def damaged(path: Path, how: str) -> CheckpointError:
    """The error of a file that is not the one that was written."""
    return CheckpointError(
        f"{path} {how}",
        rule="a checkpoint is verified whole before anything of it is loaded",
        do="resume from another one: --checkpoint best, or --checkpoint STEP",
    )


def foreign(path: Path, what: str) -> CheckpointError:
    """The error of a file that fits its manifest but holds what Samestep does not write."""
    return CheckpointError(
        f"{path} is not what Samestep writes there: {what}",
        rule="tensors as safetensors, the rest as JSON, in the form of this version",
        do="resume from a checkpoint that this version wrote; load nothing whose origin is not known",
    )


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Length and hash of each file, by its name."""
    path = checkpoint / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise damaged(path, "is missing")
    try:
        manifest = json.loads(path.read_bytes())
        said = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if said != _digest(manifest):
        raise damaged(path, "is not what was written: its SHA-256 differs")
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}",
            rule=f"format {_FORMAT}",
            do="read it with the version that wrote it",
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise foreign(path, "it does not list files of its folder, each with its bytes and its sha256")
    return files


def _require_as_written(path: Path, said: Mapping[str, Any]) -> None:
    if path.is_symlink():
        raise damaged(path, "is a link")
    if not path.is_file():
        raise damaged(path, "is missing")
    size = path.stat().st_size
    if size != said["bytes"]:
        raise damaged(path, f"has {size} bytes, not the {said['bytes']} that were written")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
            raise damaged(path, "is not what was written: its SHA-256 differs")


def _is_entry(name: str, entry: object) -> bool:
    # A name with a folder in it could lead anywhere.
    is_plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return is_plain and isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
