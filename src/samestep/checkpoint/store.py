"""A folder of checkpoints: each is complete or not there, and what is read is what was written.

A checkpoint is written aside, every file and the folder forced to disk, and then renamed, so a kill at any point
leaves either the whole of it or none. One that takes the place of another of the same step is renamed to there when
the other has been renamed aside, where it counts until it is removed. One process writes at a time (`FolderLock`);
ranks of one run may write the same bytes at the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from samestep.checkpoint.disk import make_folder, remove, sync_folder, write_errors, write_file
from samestep.checkpoint.manifest import MANIFEST, is_whole, manifest_of
from samestep.errors import CheckpointError, InputError

_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d{{9,}})")
_REPLACED = ".replaced-"


class CheckpointFolder:
    """The checkpoints of one run.

    Attributes:
        path: the folder; it need not exist yet.
        keep: how many of the newest stay, at least one; the best one stays besides.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"keep is {keep}", rule="at least 1 checkpoint stays", do="keep=1, or more")
        self.path, self.keep = path, keep

    def write(self, step: int, files: Mapping[str, bytes], *, is_best: bool = False) -> Path:
        """Write the checkpoint of `step`, point `last` (and `best`) at it, and drop what need not be kept.

        One of that step that is there already gives way, unless it holds the same.

        Raises:
            CheckpointWriteError: the disk is full, or will not have it. All other checkpoints are as they were.
        """
        final = self.path / f"{_PREFIX}{step:09d}"
        manifest = manifest_of(files)
        with write_errors(
            f"the checkpoint of step {step} cannot be written to {self.path}",
            rule="a checkpoint is written whole or not at all; those before it are as they were",
        ):
            make_folder(self.path)
            self._mend()
            if not _holds(final, manifest):
                self._write_whole(final, files, manifest)
            self._point("last", final)
            if is_best:
                self._point("best", final)
            sync_folder(self.path)
        with write_errors(
            f"the checkpoint of step {step} is written, but an older one cannot be removed from {self.path}",
            rule=f"the {self.keep} newest stay, and the best; others are removed",
        ):
            self._prune(final)
        return final

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return list(self._by_step().values())

    def find(self, which: str) -> Path:
        """The checkpoint called `last`, `best`, or by the number of its step.

        Raises:
            CheckpointError: there is none of that name.
        """
        there = self._by_step()
        if which in ("last", "best"):
            copied = self.path / which
            if copied.is_dir() and not copied.is_symlink():
                return copied  # somebody copied the run, links as what they point at
            step = self._pointed(which)
            if which == "last" and there and step not in there:
                step = max(there)
        else:
            step = int(which) if which.isascii() and which.isdigit() else None
        if step is not None and step in there:
            return there[step]
        raise CheckpointError(
            f"{self.path} has no checkpoint {which!r}",
            rule="last, best, or a step that was saved",
            do=f"steps: {', '.join(map(str, there)) or 'none'}",
        )

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that can be verified, or None.

        The newest is the last one written. Steps after that are what somebody left who went back to an earlier one:
        they come when nothing else is whole.
        """
        there, last = self._by_step(), self._pointed("last")
        newest_first = sorted(there, key=lambda step: (last is None or step <= last, step), reverse=True)
        return next((there[step] for step in newest_first if is_whole(there[step])), None)

    def clean(self) -> None:
        """Remove what an interrupted write left behind.

        Raises:
            CheckpointWriteError: it cannot be removed.
        """
        counts = self.steps()
        with write_errors(
            f"what an interrupted write left in {self.path} cannot be removed",
            rule="a run begins with whole checkpoints and nothing else",
        ):
            for left in self.path.glob(".*-*"):
                if left not in counts:
                    remove(left)

    def _by_step(self) -> dict[int, Path]:
        """Checkpoints by their step, in its order; one that was about to be replaced counts while no other does."""
        found: dict[int, Path] = {}
        for prefix in ("", _REPLACED):
            for path in self.path.glob(f"{prefix}{_PREFIX}*"):
                name = _NAME.fullmatch(path.name.removeprefix(prefix))
                if name and path.is_dir() and not path.is_symlink():
                    found.setdefault(int(name[1]), path)
        return dict(sorted(found.items()))

    def _pointed(self, name: str) -> int | None:
        """The step that a link points at, if it points at a checkpoint of this folder."""
        link = self.path / name
        target = _NAME.fullmatch(str(link.readlink())) if link.is_symlink() else None
        return int(target[1]) if target else None

    def _write_whole(self, final: Path, files: Mapping[str, bytes], manifest: bytes) -> None:
        aside = self._aside(final.name)
        try:
            aside.mkdir()
            for name, data in {**files, MANIFEST: manifest}.items():
                write_file(aside / name, data)
            sync_folder(aside)
            self._put(aside, final, manifest)
        except OSError:
            with suppress(OSError):  # what matters is told already; half a checkpoint takes room that may be needed
                remove(aside)
            raise
        sync_folder(self.path)

    def _put(self, aside: Path, final: Path, manifest: bytes) -> None:
        """Give the new checkpoint its name; there is a whole one of the step at every moment if there was before."""
        replaced = self.path / f"{_REPLACED}{final.name}"
        try:
            if os.path.lexists(final) and not _holds(final, manifest):
                final.rename(replaced)
            aside.rename(final)
        except OSError:
            if not _holds(final, manifest):  # else another rank wrote the same bytes first
                self._mend()
                raise
            remove(aside)
        remove(replaced)

    def _mend(self) -> None:
        """End what a kill interrupted in `_put`."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            final = self.path / replaced.name.removeprefix(_REPLACED)
            if os.path.lexists(final):
                remove(replaced)
            else:
                replaced.rename(final)

    def _point(self, name: str, target: Path) -> None:
        aside = self._aside(name)
        aside.symlink_to(target.name)
        aside.replace(self.path / name)

    def _prune(self, newest: Path) -> None:
        """Keep what was written last: who went back to an earlier step left later ones of the old course behind."""
        there, best = self._by_step(), self._pointed("best")
        for step, old in list(there.items())[: -self.keep]:
            if step != best and old.name != newest.name:
                # Renamed first: what is being removed must not be taken for a checkpoint.
                remove(old.rename(self._aside(f"removed-{old.name}")))

    def _aside(self, name: str) -> Path:
        """A name that no reader looks at, and that nothing has: an earlier write of this process may have failed."""
        aside = self.path / f".writing-{name}-{os.getpid()}"
        remove(aside)
        return aside


def _holds(checkpoint: Path, manifest: bytes) -> bool:
    """Whether a checkpoint is there, whole, with the content that `manifest` tells."""
    path = checkpoint / MANIFEST
    return path.is_file() and path.read_bytes() == manifest and is_whole(checkpoint)
