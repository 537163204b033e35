"""Folder of checkpoints: complete or absent, and verified by a manifest before loading.

A checkpoint is written under a temporary name, every file and the folder are forced to the disk, and the folder is then
renamed. A kill at any point leaves the complete checkpoint or none. To replace a checkpoint of the same step, the old
one is renamed first and stays valid until the removal. One process writes at a time (`FolderLock`); ranks of one run
may write the same bytes at the same time.

The manifest has the length and SHA-256 of every file, and its own SHA-256. It detects damage but is no signature: a
user with write permission can write a matching manifest. Therefore nothing read from a checkpoint can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import disk_errors, make_folder, remove, replacing, sync_folder, write_file
from samestep.errors import CheckpointError, InputError

MANIFEST, STATE = "manifest.json", "state.json"
_FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d{{9,}})")
_REPLACED = ".replaced-"


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        path: folder of the checkpoints; need not exist.
        keep: number of newest checkpoints to keep, at least one; the best one is kept in addition.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep is {keep}", expected="at least 1 checkpoint", fix="keep=1, or more", code="E_KEEP")
        self.path, self.keep = path, keep

    def write(self, step: int, files: Mapping[str, bytes], *, is_best: bool = False) -> Path:
        """Write the checkpoint of `step`, link `last` (and `best`) to it, prune older ones, and return the folder.

        An existing checkpoint of the step is replaced, unless the contents are equal.

        Raises:
            CheckpointWriteError: the disk is full or not writable. All other checkpoints are unchanged.
        """
        final = self.path / f"{_PREFIX}{step:09d}"
        manifest = _manifest(files)
        with disk_errors(
            f"the checkpoint of step {step} cannot be written to {self.path}",
            expected="a checkpoint is written completely or not at all; earlier ones are unchanged",
        ):
            make_folder(self.path)
            self._recover()
            if not _has_contents(final, manifest):
                self._write(final, files, manifest)
            self._link("last", final)
            if is_best:
                self._link("best", final)
            sync_folder(self.path)
        with disk_errors(
            f"the checkpoint of step {step} is written, but an older one cannot be removed from {self.path}",
            expected=f"the newest {self.keep} and the best are kept; others are removed",
        ):
            self._prune(final)
        return final

    def steps(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return list(self._by_step().values())

    def find(self, which: str) -> Path:
        """Return the checkpoint `last`, `best`, or that of a step number.

        Raises:
            CheckpointError: no such checkpoint.
        """
        checkpoints = self._by_step()
        if which in ("last", "best"):
            folder = self.path / which
            if folder.is_dir() and not folder.is_symlink():
                return folder  # a copy of the run in which links became folders
            step = self._link_target(which)
            if which == "last" and checkpoints and step not in checkpoints:
                step = max(checkpoints)
        else:
            step = int(which) if which.isascii() and which.isdigit() else None
        if step is not None and step in checkpoints:
            return checkpoints[step]
        raise CheckpointError(
            f"{self.path} has no checkpoint {which!r}",
            expected="last, best, or a saved step",
            fix=f"steps: {', '.join(map(str, checkpoints)) or 'none'}",
            code="E_CHECKPOINT_NOT_FOUND",
        )

    def newest_valid(self) -> Path | None:
        """Return the newest valid checkpoint, or None.

        The newest is the last one written. Higher steps remain from before a return to an earlier step; they are
        considered only if no other checkpoint is valid.
        """
        checkpoints, last = self._by_step(), self._link_target("last")
        newest_first = sorted(checkpoints, key=lambda step: (last is None or step <= last, step), reverse=True)
        return next((checkpoints[step] for step in newest_first if _is_valid(checkpoints[step])), None)

    def clean(self) -> None:
        """Remove the leftovers of an interrupted write.

        Raises:
            CheckpointWriteError: a leftover cannot be removed.
        """
        checkpoints = self.steps()
        with disk_errors(
            f"the leftovers of an interrupted write cannot be removed from {self.path}",
            expected="a folder with complete checkpoints only",
        ):
            for path in self.path.glob(".*-*"):
                if path not in checkpoints:
                    remove(path)

    def _by_step(self) -> dict[int, Path]:
        """Return checkpoints by ascending step; one renamed for replacement counts if its step has no other."""
        checkpoints: dict[int, Path] = {}
        for prefix in ("", _REPLACED):
            for path in self.path.glob(f"{prefix}{_PREFIX}*"):
                name = _NAME.fullmatch(path.name.removeprefix(prefix))
                if name and path.is_dir() and not path.is_symlink():
                    checkpoints.setdefault(int(name[1]), path)
        return dict(sorted(checkpoints.items()))

    def _link_target(self, name: str) -> int | None:
        """Return the step of the checkpoint in this folder that a link points to, or None."""
        link = self.path / name
        target = _NAME.fullmatch(str(link.readlink())) if link.is_symlink() else None
        return int(target[1]) if target else None

    def _write(self, final: Path, files: Mapping[str, bytes], manifest: bytes) -> None:
        temporary = self._temporary(final.name)
        try:
            temporary.mkdir()
            for name, data in {**files, MANIFEST: manifest}.items():
                write_file(temporary / name, data)
            sync_folder(temporary)
            self._rename(temporary, final, manifest)
        except OSError:
            with suppress(OSError):  # the first error is raised; an incomplete checkpoint would occupy space
                remove(temporary)
            raise
        sync_folder(self.path)

    def _rename(self, temporary: Path, final: Path, manifest: bytes) -> None:
        """Rename the new checkpoint; a complete checkpoint of an existing step is present at every moment."""
        replaced = self.path / f"{_REPLACED}{final.name}"
        try:
            if os.path.lexists(final) and not _has_contents(final, manifest):
                final.rename(replaced)
            temporary.rename(final)
        except OSError:
            if not _has_contents(final, manifest):  # otherwise another rank has written the same bytes
                self._recover()
                raise
            remove(temporary)
        remove(replaced)

    def _recover(self) -> None:
        """Complete or undo a replacement that a kill interrupted."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            final = self.path / replaced.name.removeprefix(_REPLACED)
            if os.path.lexists(final):
                remove(replaced)
            else:
                replaced.rename(final)

    def _link(self, name: str, target: Path) -> None:
        with replacing(self.path / name) as link:
            link.symlink_to(target.name)

    def _prune(self, newest: Path) -> None:
        """Remove old checkpoints but `newest`: after a return to an earlier step, higher steps remain."""
        checkpoints, best = self._by_step(), self._link_target("best")
        for step, path in list(checkpoints.items())[: -self.keep]:
            if step != best and path.name != newest.name:
                # Renamed first: a partly removed folder must not count as a checkpoint.
                remove(path.rename(self._temporary(f"removed-{path.name}")))

    def _temporary(self, name: str) -> Path:
        """Return a free name that readers ignore; a failed write of this process may have left a folder."""
        path = self.path / f".writing-{name}-{os.getpid()}"
        remove(path)
        return path


def verify(checkpoint: Path, *names: str) -> None:
    """Verify every file of a checkpoint, including `names`, against the manifest.

    Raises:
        CheckpointError: a file is missing, a link, outside the folder, unreadable, or has another length or hash; or
            the manifest itself is damaged.
    """
    files = _read_manifest(checkpoint)
    missing = [name for name in names if name not in files]
    if missing:
        raise _damaged(checkpoint / missing[0], "is not in the manifest")
    for name, entry in files.items():
        try:
            _verify_file(checkpoint / name, entry)
        except OSError as error:
            raise _damaged(checkpoint / name, f"cannot be read: {error.strerror}") from error


def read_json(checkpoint: Path, name: str, *others: str) -> dict[str, Any]:
    """Verify a checkpoint, including the files `others`, and return one of its JSON objects.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file is no JSON object.
    """
    verify(checkpoint, name, *others)
    with contents_errors(checkpoint / name):
        data = json.loads((checkpoint / name).read_bytes())
    if not isinstance(data, dict):
        raise invalid_contents(checkpoint / name, f"a {type(data).__name__} in place of an object")
    return data


def read_origin(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """Verify a checkpoint, and return its step and resolved recipe.

    Raises:
        CheckpointError: the checkpoint is damaged or has invalid contents.
    """
    state = read_json(checkpoint, STATE)
    with contents_errors(checkpoint / STATE):
        return int(state["progress"]["step"]), dict(state["progress"]["recipe"])


@contextmanager
def contents_errors(path: Path) -> Iterator[None]:
    """Convert errors of unexpected contents; files that match the manifest can still hold any data.

    Raises:
        CheckpointError: in place of such an error.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise invalid_contents(path, f"{type(error).__name__}: {error}") from error


def invalid_contents(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file that matches its manifest but has contents that Samestep does not write."""
    return CheckpointError(
        f"{path} has invalid contents: {problem}",
        expected="tensors as safetensors, other state as JSON, in the format of this version",
        fix="resume from a checkpoint of this version; do not load files of unknown origin",
        code="E_CHECKPOINT_FORMAT",
    )


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {problem}",
        expected="a complete checkpoint, verified before any part is loaded",
        fix="resume from another one: --checkpoint best, or --checkpoint STEP",
        code="E_CHECKPOINT_DAMAGED",
    )


def _manifest(files: Mapping[str, bytes]) -> bytes:
    entries = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = {"format": _FORMAT, "files": entries}
    manifest["sha256"] = _digest(manifest)
    return json.dumps(manifest, indent=1).encode()


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return length and hash by file name."""
    path = checkpoint / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise _damaged(path, "is missing")
    try:
        manifest = json.loads(path.read_bytes())
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    if digest != _digest(manifest):
        raise _damaged(path, "was changed: its SHA-256 differs")
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}",
            expected=f"format {_FORMAT}",
            fix="read the checkpoint with the version that wrote the files",
            code="E_CHECKPOINT_FORMAT",
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise invalid_contents(path, "no list of files with bytes and sha256")
    return files


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if path.is_symlink():
        raise _damaged(path, "is a link")
    if not path.is_file():
        raise _damaged(path, "is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(path, f"has {size} bytes instead of {entry['bytes']}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise _damaged(path, "was changed: its SHA-256 differs")


def _is_entry(name: str, entry: object) -> bool:
    # A name with a folder part could point outside the checkpoint.
    is_plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return is_plain and isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _is_valid(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def _has_contents(checkpoint: Path, manifest: bytes) -> bool:
    """Return whether a valid checkpoint with this manifest exists."""
    path = checkpoint / MANIFEST
    return path.is_file() and path.read_bytes() == manifest and _is_valid(checkpoint)
