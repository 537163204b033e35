"""Caches of this account: list and removal."""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from samestep.data.streams.cache import KIND
from samestep.distributed.env import cache_folder
from samestep.errors import RunError
from samestep.zoo.cache.parts import Parts
from samestep.zoo.cache.sample_cache import DESCRIPTION

_REMOVED = ".removed-"


@dataclass(frozen=True)
class CacheInfo:
    """One cache on the disk.

    Attributes:
        name: name of the folder in `cache_folder()`.
        kind: `decoded` or `encoded` samples, or `files` of an object store.
        source: folder or address of the files.
        entries: number of samples or files.
        bytes: size of all files of the cache.
    """

    name: str
    kind: str
    source: str
    entries: int
    bytes: int


def list_caches() -> list[CacheInfo]:
    """Return the caches, sorted by name."""
    paths = sorted(cache_folder().glob(f"*/{DESCRIPTION}"))
    return [_info(path.parent) for path in paths if not path.parent.name.startswith(_REMOVED)]


def remove_cache(name: str) -> None:
    """Remove a cache; runs that use it continue without.

    Raises:
        RunError: the files cannot be removed.
    """
    folder = cache_folder() / name
    try:
        # A run that builds the cache finds no folder for new files, so that the removal meets no new names.
        folder.rename(folder.with_name(f"{_REMOVED}{name}-{secrets.token_hex(4)}"))
        for removed in folder.parent.glob(f"{_REMOVED}*"):  # those of killed commands too
            shutil.rmtree(removed)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be removed: {error.strerror}",
            expected="a folder that can be written",
            fix="make the folder writable, and repeat the command",
            code="E_OUTPUT",
        ) from error


def _info(folder: Path) -> CacheInfo:
    try:
        facts = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        kind, source = str(facts["kind"]), str(facts["source"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged: listed, so that it can be removed
        kind, source = "unknown", "unknown"
    files = [path for path in folder.rglob("*") if path.is_file()]
    entries = sum(path.parent.name == "files" for path in files) if kind == KIND else len(Parts(folder))
    return CacheInfo(folder.name, kind, source, entries, sum(path.stat().st_size for path in files))
