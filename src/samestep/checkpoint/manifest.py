"""Manifest of a checkpoint: length and SHA-256 of every file, verified before loading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Len

from samestep.checkpoint.contents import Count, Strict, invalid_contents, parse
from samestep.checkpoint.durable_files import Contents, pieces
from samestep.distributed.disk_operations import read_small
from samestep.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 2


@dataclass(frozen=True)
class SavedFile(Strict):
    """Entry of a file in the manifest."""

    bytes: Count
    sha256: Annotated[str, Len(64, 64)]


@dataclass(frozen=True)
class Manifest(Strict):
    """Files of a checkpoint by name."""

    format: int
    files: dict[str, SavedFile]


def build_manifest(files: Mapping[str, Contents]) -> bytes:
    """Return the manifest of files with these contents."""
    entries = {}
    for name, contents in files.items():
        digest = hashlib.sha256()
        size = 0
        for piece in pieces(contents):
            digest.update(piece)
            size += len(piece)
        entries[name] = {"sha256": digest.hexdigest(), "bytes": size}
    manifest: dict[str, object] = {"format": _FORMAT, "files": entries}
    manifest["sha256"] = _digest(manifest)
    return json.dumps(manifest, indent=1).encode()


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
        path = checkpoint / name
        try:
            if path.is_symlink() or not path.is_file():
                raise damaged(path, "is missing, or a link")
            size = path.stat().st_size
            if size != entry.bytes:  # before the contents, which take longer to read
                raise damaged(path, f"has {size} bytes instead of {entry.bytes}")
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise damaged(path, f"cannot be read: {error}") from error
        if digest != entry.sha256:
            raise damaged(path, "was changed: its SHA-256 differs")


def file_names(checkpoint: Path) -> set[str]:
    """Return the names of the files in the manifest.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    return set(_read_manifest(checkpoint))


def manifest_digest(checkpoint: Path) -> str:
    """Return the hash of a manifest, by which ranks compare a checkpoint; empty without one."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damaged(path: Path, problem: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(
        f"{path} {problem}",
        expected="a complete checkpoint, verified before any part is loaded",
        fix="resume from another one: --checkpoint best, or --checkpoint STEP",
        code="E_CHECKPOINT",
    )


def _read_manifest(checkpoint: Path) -> dict[str, SavedFile]:
    """Return length and hash by file name."""
    path = checkpoint / MANIFEST
    try:
        if not path.is_file() or path.is_symlink():
            raise damaged(path, "is missing")
        manifest = json.loads(read_small(path))
        # The manifest has a hash of itself, since it decides what the other files must be.
        is_unchanged = manifest.pop("sha256") == _digest(manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if not is_unchanged:
        raise damaged(path, "was changed: its SHA-256 differs")
    # Before the keys, which differ between formats.
    if manifest.get("format") != _FORMAT:
        raise invalid_contents(path, f"its format is {manifest.get('format')}, not {_FORMAT}")
    files = parse(Manifest, json.dumps(manifest).encode(), path).files
    for name in files:
        # A name with a folder part could point outside the checkpoint.
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise invalid_contents(path, f"{name!r} is not the name of a file")
    return files


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
