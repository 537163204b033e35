"""Folder of checkpoints: complete or absent, and verified by a manifest before loading.

A checkpoint is written under a temporary name, forced to the disk, and renamed. To replace a
checkpoint of the same step, the old one is renamed first and stays valid until the removal. One
process writes at a time (`FolderLock`); ranks of one run may write the same bytes at the same time.

Decisions: docs/decisions/runs.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.checkpoint.contents import SavedState, parse
from samestep.checkpoint.durable_files import (
    Contents,
    disk_errors,
    link_name,
    linked_name,
    make_folder,
    remove,
    sync_folder,
    write_file,
)
from samestep.checkpoint.manifest import MANIFEST, build_manifest, verify
from samestep.config import DEFAULT_KEEP
from samestep.distributed.disk_operations import HeldFolder, disk_operations, read_small
from samestep.errors import CheckpointError, InputError

STATE = "state.json"
_PREFIX = "step-"
# At least nine digits: names sort as steps do.
_NAME = re.compile(rf"{_PREFIX}(\d{{9,}})")
_REPLACED = ".replaced-"
_EPOCH_PREFIX = "epoch-"
_EPOCH_NAME = re.compile(rf"{_EPOCH_PREFIX}\d+")
# Names of this class, `link_name` and `unsupported_features`; the folder can have other hidden
# files.
_LEFTOVER = re.compile(
    rf"\.(writing-|trial-|replaced-{_PREFIX}\d|(last|best|{_EPOCH_PREFIX}\d+)-\d+(-|$)).*"
)


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        path: folder of the checkpoints; need not exist.
        keep: number of newest checkpoints to keep, at least one; the best one is kept in addition.
        held: folder of `hold`, if any.
    """

    def __init__(self, path: Path, keep: int = DEFAULT_KEEP) -> None:
        if keep < 1:
            raise InputError(
                f"keep is {keep}",
                expected="at least 1 checkpoint",
                fix="keep=1, or more",
                code="E_VALUE",
            )
        self.path = path
        self.keep = keep
        self.held: HeldFolder | None = None

    def hold(self, root: HeldFolder) -> None:
        """Write only while the held folder, a parent of `path` or `path` itself, has its path."""
        self.held = root

    def write(
        self,
        step: int,
        files: Mapping[str, Contents],
        *,
        is_best: bool = False,
        epoch: int | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, prune older ones, and return its folder.

        `last` is linked to it; with `is_best`, `best`; and with the number of complete epochs,
        `epoch-N`. An existing checkpoint of the step is replaced, unless the contents are equal.

        Raises:
            CheckpointWriteError: the disk is full or not writable. All other checkpoints are
                unchanged.
            RunMovedError: the held folder was moved, removed or replaced; nothing is written.
        """
        if self.held is not None:
            self.held.require_in_place()
        links = ["last"]
        if is_best:
            links.append("best")
        if epoch is not None:
            links.append(f"{_EPOCH_PREFIX}{epoch}")
        with disk_errors(
            f"the checkpoint of step {step} cannot be written to {self.path}",
            expected="a checkpoint is written completely or not at all; earlier ones are unchanged",
        ):
            final = self._save(f"{_PREFIX}{step:09d}", files, links)
        with (
            disk_errors(
                f"the checkpoint of step {step} is written, but an older one cannot be removed "
                f"from {self.path}",
                expected=f"the newest {self.keep} and the best are kept; others are removed",
            ),
            disk_operations.run("removal in", self.path),
        ):
            self._prune(final)
        return final

    def steps(self) -> list[Path]:
        """Return the complete checkpoints, oldest first.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        with self._read_errors():
            return list(self._by_step().values())

    def find(self, which: str) -> Path:
        """Return the checkpoint `last`, `best`, `epoch-N`, or that of a step number.

        Raises:
            CheckpointError: no such checkpoint.
        """
        with self._read_errors():
            checkpoints = self._by_step()
            folder = self.path / which
            target = self._link_target(which)
            is_folder = folder.is_dir() and not folder.is_symlink()
        if which in ("last", "best") or _EPOCH_NAME.fullmatch(which):
            if is_folder:
                return folder  # a copy of the run in which links became folders
            step = target
            # The link may be missing after a copy by a program that leaves links out.
            if which == "last" and checkpoints and step not in checkpoints:
                step = max(checkpoints)
        elif which.isascii() and which.isdigit():
            step = int(which)
        else:
            step = None
        if step in checkpoints:
            return checkpoints[step]
        raise CheckpointError(
            f"{self.path} has no checkpoint {which!r}",
            expected="last, best, epoch-N, or a saved step",
            fix=f"steps: {', '.join(map(str, checkpoints)) or 'none'}",
            code="E_CHECKPOINT",
        )

    def newest_valid(self) -> Path | None:
        """Return the newest valid checkpoint, or None.

        The newest is the last one written. Higher steps remain from before a return to an earlier
        step; they are considered only if no other checkpoint is valid.
        """
        with self._read_errors():
            checkpoints = self._by_step()
            last = self._link_target("last")
        order = sorted(checkpoints, key=lambda step: (last is None or step <= last, step))
        for step in reversed(order):
            try:
                verify(checkpoints[step])
            except CheckpointError:
                continue
            return checkpoints[step]
        return None

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
                # A replaced checkpoint stays if no other one of the step is there.
                if path not in checkpoints and _LEFTOVER.fullmatch(path.name):
                    remove(path)

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror}",
                expected="a folder of checkpoints that this account can read",
                fix="correct the path or the permissions",
                code="E_UNREADABLE",
            ) from error

    def _save(self, name: str, files: Mapping[str, Contents], links: Sequence[str]) -> Path:
        """Write a checkpoint and its links, and return its folder."""
        final = self.path / name
        manifest = build_manifest(files)
        with disk_operations.run("update", self.path):
            make_folder(self.path)
            # Before the comparison: a kill may have left the checkpoint under another name.
            self._recover()
        if not _has_contents(final, manifest):
            self._write(final, files, manifest)
        for link in links:
            with disk_operations.run("link", self.path / link):
                link_name(self.path / link, name)
        sync_folder(self.path)
        return final

    def _by_step(self) -> dict[int, Path]:
        """Return checkpoints by ascending step; one that is being replaced counts if alone."""
        checkpoints: dict[int, Path] = {}
        for prefix in ("", _REPLACED):
            for path in self.path.glob(f"{prefix}{_PREFIX}*"):
                name = _NAME.fullmatch(path.name.removeprefix(prefix))
                if name and path.is_dir() and not path.is_symlink():
                    checkpoints.setdefault(int(name[1]), path)
        return dict(sorted(checkpoints.items()))

    def _link_target(self, name: str) -> int | None:
        """Return the step of the checkpoint in this folder that a link points to, or None."""
        if target := _NAME.fullmatch(linked_name(self.path / name) or ""):
            return int(target[1])
        return None

    def _write(self, final: Path, files: Mapping[str, Contents], manifest: bytes) -> None:
        temporary = self._temporary(final.name)
        try:
            with disk_operations.run("mkdir", temporary):
                temporary.mkdir()
            for name, contents in {**files, MANIFEST: manifest}.items():
                write_file(temporary / name, contents)
            sync_folder(temporary)
            with disk_operations.run("rename", temporary):
                self._rename(temporary, final, manifest)
        except OSError:
            # An incomplete checkpoint would occupy space; the first error is the one to raise.
            with suppress(OSError):
                remove(temporary)
            raise
        sync_folder(self.path)

    def _rename(self, temporary: Path, final: Path, manifest: bytes) -> None:
        """Rename the new checkpoint; a complete one of the step is present at every moment."""
        replaced = self.path / f"{_REPLACED}{final.name}"
        try:
            if os.path.lexists(final) and not _has_contents(final, manifest):
                final.rename(replaced)
            temporary.rename(final)
        except OSError:
            if not _has_contents(final, manifest):
                self._recover()
                raise
            remove(temporary)  # another rank has written the same bytes
        remove(replaced)

    def _recover(self) -> None:
        """Complete or undo a replacement that a kill interrupted."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            final = self.path / replaced.name.removeprefix(_REPLACED)
            if os.path.lexists(final):
                remove(replaced)
            else:
                replaced.rename(final)

    def _prune(self, newest: Path) -> None:
        best = self._link_target("best")
        last = int(newest.name.removeprefix(_PREFIX))
        # After a return to an earlier step, higher steps remain, and do not count.
        present = [(step, path) for step, path in self._by_step().items() if step <= last]
        for step, path in present[: -self.keep]:
            if step != best:
                # Renamed first: a partly removed folder must not count as a checkpoint.
                remove(path.rename(self._temporary(f"removed-{path.name}")))
        checkpoints = self._by_step()
        for link in self.path.glob(f"{_EPOCH_PREFIX}*"):
            is_copy = link.is_dir() and not link.is_symlink()
            is_link = _EPOCH_NAME.fullmatch(link.name) and not is_copy
            if is_link and self._link_target(link.name) not in checkpoints:
                link.unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        """Return a free name that readers ignore."""
        path = self.path / f".writing-{name}-{os.getpid()}"
        remove(path)  # of a failed write of this process
        return path


def read_state(checkpoint: Path, *others: str) -> SavedState:
    """Verify a checkpoint, including the files `others`, and return its state without tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or has invalid contents.
    """
    return read_states(checkpoint, [STATE], others)[STATE]


def read_states(
    checkpoint: Path, names: Sequence[str], others: Sequence[str]
) -> dict[str, SavedState]:
    """Verify a checkpoint once, and return the states without tensors by file name.

    Raises:
        CheckpointError: the checkpoint is damaged, or has invalid contents.
    """
    verify(checkpoint, *names, *others)
    paths = {name: checkpoint / name for name in names}
    return {name: parse(SavedState, path.read_bytes(), path) for name, path in paths.items()}


def _has_contents(checkpoint: Path, manifest: bytes) -> bool:
    """Return whether a valid checkpoint with this manifest exists."""
    path = checkpoint / MANIFEST
    if not path.is_file() or read_small(path) != manifest:
        return False
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True
