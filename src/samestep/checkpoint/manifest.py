"""Manifest of a checkpoint, verified before any file is loaded.

The manifest has the length and SHA-256 of every file, and its own SHA-256. It detects damage but is no signature: a
user with write permission can write a matching manifest. Therefore nothing read from a checkpoint can run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import Contents, pieces
from samestep.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1


def verify(checkpoint: Path, *names: str) -> None:
    """Verify every file of a checkpoint, including `names`, against the manifest.

    Raises:
        CheckpointError: a file is missing, a link, outside the folder, unreadable, or has another length or hash; or
            the manifest itself is damaged.
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
    manifest = {"format": _FORMAT, "files": {name: _entry(contents) for name, contents in files.items()}}
    manifest["sha256"] = _digest(manifest)
    return json.dumps(manifest, indent=1).encode()


def _entry(contents: Contents) -> dict[str, object]:
    digest, size = hashlib.sha256(), 0
    for piece in pieces(contents):
        digest.update(piece)
        size += len(piece)
    return {"sha256": digest.hexdigest(), "bytes": size}


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
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
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}",
            expected=f"format {_FORMAT}",
            fix="read the checkpoint with the version that wrote the files",
            code="E_CHECKPOINT",
        )
    files: dict[str, dict[str, Any]] = manifest["files"]
    if any("/" in name for name in files):
        raise damaged(path, "names a file outside of its folder")
    return files


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    if path.is_symlink() or not path.is_file():
        raise damaged(path, "is missing, or a link")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise damaged(path, f"has {size} bytes instead of {entry['bytes']}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise damaged(path, "was changed: its SHA-256 differs")


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
