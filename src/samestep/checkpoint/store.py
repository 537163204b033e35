"""A folder of checkpoints: each is complete or not there, and what is read is what was written.

A checkpoint is written aside, every file and the folder forced to disk, and then renamed, so a kill at any point
leaves either the whole of it or none. Its manifest holds the SHA-256 of every file and of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_PREFIX = "step-"


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        path: the folder; it need not exist yet.
        keep: how many of the newest stay; the best one stays besides.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self.keep = path, keep

    def write(self, step: int, files: Mapping[str, bytes], *, is_best: bool = False) -> Path:
        """Write the checkpoint of `step`, point `last` (and `best`) at it, and drop what need not be kept.

        A whole checkpoint of that step that is there already is left as it is.
        """
        final = self.path / f"{_PREFIX}{step:09d}"
        self.path.mkdir(parents=True, exist_ok=True)
        if final.exists() and not _is_whole(final):
            self._remove(final)
        if not final.exists():
            self._write_whole(final, files)
        self._point("last", final)
        if is_best:
            self._point("best", final)
        self._prune(final)
        return final

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.path.glob(f"{_PREFIX}*") if path.is_dir())

    def find(self, which: str) -> Path:
        """The checkpoint called `last`, `best`, or by the number of its step.

        Raises:
            CheckpointError: there is none of that name.
        """
        is_step = which.isascii() and which.isdigit()
        found = self.path / (f"{_PREFIX}{int(which):09d}" if is_step else which)
        there = self.steps()
        if which == "last" and there:
            return self.path / found.readlink() if found.is_dir() else there[-1]
        if (is_step or which == "best") and found.is_dir():
            return self.path / found.readlink() if found.is_symlink() else found
        known = ", ".join(str(int(path.name.removeprefix(_PREFIX))) for path in there) or "none"
        raise CheckpointError(
            f"{self.path} has no checkpoint {which!r}",
            rule="last, best, or a step that was saved",
            do=f"steps: {known}",
        )

    def clean(self) -> None:
        """Remove what an interrupted write left behind."""
        for left in self.path.glob(".*-*"):
            if left.is_symlink():
                left.unlink()
            else:
                shutil.rmtree(left)

    def _write_whole(self, final: Path, files: Mapping[str, bytes]) -> None:
        aside = self.path / f".writing-{final.name}-{os.getpid()}"
        if aside.exists():  # a write of this process that failed
            shutil.rmtree(aside)
        aside.mkdir()
        sums = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
        manifest = {"format": _FORMAT, "files": sums}
        manifest["sha256"] = _digest(manifest)
        for name, data in {**files, MANIFEST: json.dumps(manifest, indent=1).encode()}.items():
            with (aside / name).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(aside)
        try:
            aside.rename(final)
        except OSError:
            if not final.exists():  # else another rank wrote the same bytes first
                raise
            shutil.rmtree(aside)
        _sync_folder(self.path)

    def _point(self, name: str, target: Path) -> None:
        aside = self.path / f".{name}-{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(target.name)
        aside.replace(self.path / name)

    def _prune(self, newest: Path) -> None:
        """Keep what was written last: who went back to an earlier step left later ones of the old course behind."""
        best = self.path / "best"
        kept = {newest.name} | ({best.readlink().name} if best.is_symlink() else set())
        for old in self.steps()[: -self.keep]:
            if old.name not in kept:
                self._remove(old)

    def _remove(self, checkpoint: Path) -> None:
        # Renamed first: what is being removed must not be taken for a checkpoint.
        shutil.rmtree(checkpoint.rename(self.path / f".writing-removed-{checkpoint.name}"))


def verify(checkpoint: Path) -> None:
    """Check that every file of a checkpoint is the one that was written.

    Raises:
        CheckpointError: a file is missing, has another length or another hash, or the manifest itself is damaged.
    """
    manifest = _read_manifest(checkpoint)
    for name, said in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise _damaged(path, "is missing")
        size = path.stat().st_size
        if size != said["bytes"]:
            raise _damaged(path, f"has {size} bytes, not the {said['bytes']} that were written")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
                raise _damaged(path, "is not what was written: its SHA-256 differs")


def _is_whole(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint, after verifying all of it."""
    verify(checkpoint)
    said: dict[str, Any] = json.loads((checkpoint / name).read_bytes())
    return said


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise _damaged(path, "is missing")
    try:
        manifest = json.loads(path.read_bytes())
        said = manifest.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    if said != _digest(manifest):
        raise _damaged(path, "is not what was written: its SHA-256 differs")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}",
            rule=f"format {_FORMAT}",
            do="read it with the version that wrote it",
        )
    return dict(manifest)


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {how}",
        rule="a checkpoint is verified whole before anything of it is loaded",
        do="resume from another one: --checkpoint best, or --checkpoint STEP",
    )


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
