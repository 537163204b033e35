"""The checkpoints that a run has, as they lie on the disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointError


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint; its files are looked at, not verified.

    Attributes:
        names: `best`, `last`, both or neither.
        written: time of day.
        sizes: bytes of each file, by its name.
    """

    step: int
    names: tuple[str, ...]
    written: float
    sizes: dict[str, int]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


def read_saved(path: Path) -> list[SavedCheckpoint]:
    """The checkpoints in the folder `path`, oldest first."""
    folder, names = CheckpointFolder(path), {}
    for name in ("best", "last"):
        with suppress(CheckpointError):  # there is none of that name
            names[name] = folder.find(name)
    found = []
    for checkpoint in folder.steps():
        # One that a run replaces or removes while it is read has no files any more.
        with suppress(FileNotFoundError):
            files = {file.name: file.stat() for file in sorted(checkpoint.iterdir()) if file.is_file()}
            found.append(
                SavedCheckpoint(
                    step=int(checkpoint.name.rpartition("-")[2]),
                    names=tuple(name for name, pointed in names.items() if pointed == checkpoint),
                    written=max((stat.st_mtime for stat in files.values()), default=0.0),
                    sizes={name: stat.st_size for name, stat in files.items()},
                )
            )
    return found
