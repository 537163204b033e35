"""The folder of runs: whether files can be written, renamed and locked there, and how much."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from samestep.tools.doctor.finding import Finding, fails, informs, passes, size_text, warns

_TRIAL_BYTES = 1 << 20
# Three checkpoints (two newest, best) of 30 million parameters with Adam in float32.
_LITTLE = 1 << 30
_FEW_FILES = 1000
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "virtiofs"}
_IN_MEMORY = {"tmpfs", "ramfs"}
_OF_CONTAINER = {"overlay", "aufs"}
# By more than this files' times differ from the clock's where a server's clock runs apart.
_SKEW_SECONDS = 2.0


@dataclass(frozen=True)
class Folder:
    """What was tried where runs would be written.

    Attributes:
        path: the folder of runs, as it is named.
        kind: of its file system; empty where nobody says.
        free: bytes that this user can still write; None where nobody says.
        files_left: files that can still be made there; None where the file system has no such limit.
        failed: what could not be done, with the system's reason; None where all could.
        fsync_seconds: how long it took to have a MiB on the disk.
        locks: other processes can be kept out of a file.
        skew_seconds: by how much the time of a new file is ahead of the clock.
    """

    path: str
    kind: str = ""
    free: int | None = None
    files_left: int | None = None
    failed: str | None = None
    fsync_seconds: float = 0.0
    locks: bool = True
    skew_seconds: float = 0.0


def read_folder(path: Path) -> Folder:
    """Try it: write, read, rename and lock a file there, and remove it again.

    A folder that is not there yet is not made: it is tried in the nearest one above.
    """
    absolute = path.absolute()
    place = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    found = Folder(str(path), kind=_kind(place))
    with suppress(OSError):
        numbers = os.statvfs(place)
        found = replace(
            found,
            free=numbers.f_bavail * numbers.f_frsize,
            files_left=numbers.f_favail if numbers.f_files else None,
        )
    doing = "a folder made"
    try:
        aside = Path(tempfile.mkdtemp(prefix=".samestep-doctor-", dir=place))
        try:
            doing = f"{size_text(_TRIAL_BYTES)} written"
            return _try_files(aside, found)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        return replace(found, failed=f"cannot have {doing} in it: {error.strerror or error}")


def _try_files(folder: Path, found: Folder) -> Folder:
    content, first, second = os.urandom(_TRIAL_BYTES), folder / "first", folder / "second"
    began, before = time.monotonic(), time.time()
    with first.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    written = first.stat().st_mtime
    skew = max(0.0, written - time.time()) + min(0.0, written - before)
    locks = _try_lock(first)
    first.rename(second)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    if second.read_bytes() != content:
        return replace(found, failed="gives back other bytes than were written")
    return replace(found, fsync_seconds=seconds, locks=locks, skew_seconds=skew)


def _try_lock(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def _kind(place: Path) -> str:
    resolved, kind, longest = str(place.resolve()), "", -1
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        if len(mount) >= longest and (resolved == mount or resolved.startswith(mount.rstrip("/") + "/")):
            kind, longest = partition.fstype, len(mount)  # of two on one place the later one is seen
    return kind


def check_folder(folder: Folder) -> Iterator[Finding]:
    """Whether a run can be written there."""
    name = "runs folder"
    if folder.failed is not None:
        yield fails(
            name,
            f"{folder.path}: {folder.failed}",
            rule="a run writes files, makes them durable and renames them (fsync, rename)",
            do="name a folder on a disk with room that this user can write: --runs DIR",
        )
    else:
        milliseconds = 1000 * folder.fsync_seconds
        yield passes(name, f"{folder.path} can be written, 1 MiB is on the disk in {milliseconds:.0f} ms")
        if not folder.locks:
            yield warns(
                "locks of files",
                "there are none on this file system",
                rule="a run's folder is locked, so that only one run writes into it",
                do="mount with locks (Lustre: -o flock), or see to it that no two runs have one name",
            )
    yield from _check_room(folder)
    yield from _check_kind(folder)


def _check_room(folder: Folder) -> Iterator[Finding]:
    if folder.free is not None:
        yield _check_free(folder.free)
    if folder.files_left is not None and folder.files_left < _FEW_FILES:
        yield warns(
            "number of files",
            f"{folder.files_left} more can be made on the file system of the runs",
            rule=f"{_FEW_FILES} or more",
            do="remove files, or --runs DIR on another file system; df -i",
        )


def _check_free(free: int) -> Finding:
    if free >= _LITTLE:
        return passes("free space for runs", size_text(free))
    return warns(
        "free space for runs",
        size_text(free),
        rule="a checkpoint has the size of weights and optimizer state, and four can lie there at a time: two newest, "
        "best, and one that is being written",
        do="make room, or --runs DIR on another disk; a full disk costs the newest checkpoint, not older ones",
    )


def _check_kind(folder: Folder) -> Iterator[Finding]:
    kind, name = folder.kind, "file system of runs"
    if not kind:
        return
    if kind in _REMOTE or kind.startswith("fuse"):
        yield informs(name, f"{kind}, over the network: all machines see it; every checkpoint travels")
    elif kind in _IN_MEMORY:
        yield informs(name, f"{kind}, in memory: runs are gone when the machine restarts, and take its memory")
    elif kind in _OF_CONTAINER:
        yield informs(name, f"{kind}, a container's own: runs are gone with it unless they are copied out")
    else:
        yield informs(name, kind)


def check_times(folder: Folder) -> Finding:
    """Whether files' times follow the clock."""
    name, skew = "files' times", folder.skew_seconds
    if folder.failed is not None:
        return informs(name, "not seen, since no file could be written")
    if abs(skew) <= _SKEW_SECONDS:
        return passes(name, "follow the clock")
    return warns(
        name,
        f"new files are {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the clock",
        rule="a file server and this machine have one time",
        do="have both follow a time server (chrony, ntpd)",
    )
