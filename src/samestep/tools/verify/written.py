"""Files that an unchanged script writes in a trial: their contents are compared.

The end of a trial restores the previous state: new files are removed, and changed or removed ones
are copied back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from samestep.launcher.job import rank_and_size
from samestep.script.file_journal import Journal, copy_file
from samestep.script.files import FirstWriter
from samestep.script.replaced import PATHS, Replaced, replaced
from samestep.tools.verify.tensor_comparison import digest, leaves

_JOURNAL = "written.jsonl"
_ABSENT = "absent"
_FILE = "file"
_FOLDER = "folder"
_LINK = "link"
_OWN_NUMBER = re.compile(r"\d{4,}")  # a process id or a time in the name of a file


@contextmanager
def recorded_files(folder: Path, scratch: Path) -> Iterator[None]:
    """Record the state of each path before rank 0 changes it for the first time, during the block.

    Args:
        folder: folder of the trial, which receives the records.
        scratch: the script's folder in it, whose files count as those of the script.
    """
    rank, size = rank_and_size()
    if rank > 0:
        yield
        return
    journal = Journal(str(folder / _JOURNAL))
    own = os.path.realpath(folder) + os.sep
    inside = os.path.realpath(scratch) + os.sep
    recorded: set[str] = set()
    change = FirstWriter._change

    def recording(self: FirstWriter, path: Any, *, follow: bool = True, **options: bool) -> str:
        name = self._name(path, follow=follow) if isinstance(path, PATHS) else ""
        is_own = (
            not name
            or self._exempt.covers(name)
            or (name.startswith(own) and not name.startswith(inside))
        )
        if not is_own and name not in recorded:
            recorded.add(name)
            journal.append(name, *_copied(name, folder / f"before-{len(recorded)}"))
        return change(self, path, follow=follow, **options)

    with ExitStack() as stack:
        stack.enter_context(replaced(FirstWriter, _change=recording))
        if size == 1:  # no other rank needs a replacement of the functions of files
            (folder / "writer").mkdir()
            functions = Replaced(FirstWriter(str(folder / "writer"), sys.maxsize))
            stack.callback(functions.undo)
        yield


def _copied(name: str, copy: Path) -> tuple[str, str]:
    """Return the kind of a path, and the path of a copy of a file, or the target of a link."""
    try:
        mode = os.lstat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT, ""
    if stat.S_ISLNK(mode):
        return _LINK, os.readlink(name)
    if stat.S_ISDIR(mode):
        return _FOLDER, ""
    copy_file(name, str(copy), float("inf"))
    return _FILE, str(copy)


def restore_files(folder: Path) -> None:
    """Restore the state of all paths before the trial in a folder."""
    for name, kind, content in reversed(_entries(folder)):
        if kind == _FOLDER:
            os.makedirs(name, exist_ok=True)
            continue
        if os.path.isdir(name) and not os.path.islink(name):
            with suppress(OSError):  # it contains files without a record
                os.rmdir(name)
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(name)
        if kind == _LINK:
            os.symlink(content, name)
        elif kind == _FILE:
            shutil.copy2(content, name)


def _entries(folder: Path) -> list[list[str]]:
    """Return path, kind, and copy or target, of each path that changed, in the order of the first changes."""
    journal = folder / _JOURNAL
    if journal.exists():
        return list(map(json.loads, journal.read_text(encoding="utf-8").splitlines()))
    return []


def describe_files(folder: Path, scratch: Path, start: Path, *, bits: bool) -> list[str]:
    """Describe all files that rank 0 has written: lines of text, and tensors of `torch.save`.

    Other binary files have a line with their name only.

    Args:
        folder: folder of the trial.
        scratch: folder of the script in it.
        start: working directory of the script at its start, to which names are relative.
        bits: hash tensors, in place of their norms.
    """
    names = {name for name, *_ in _entries(folder) if os.path.isfile(name)}
    inside = os.path.realpath(scratch)
    lines = []
    for name in sorted(names):
        is_own = name.startswith(inside + os.sep)
        label = _OWN_NUMBER.sub("#", os.path.relpath(name, inside if is_own else start.resolve()))
        lines += [f"{label}:", *(f"{label}: {line}" for line in _content(Path(name), bits=bits))]
    return lines


def _content(file: Path, *, bits: bool) -> list[str]:
    if zipfile.is_zipfile(file):
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except (
            Exception
        ) as error:  # boundary: of another program, or objects of the script, which are not loaded
            return [f"not compared: {type(error).__name__}"]
        return [f"{path} {_value(leaf, bits=bits)}" for path, leaf in leaves(saved)]
    with suppress(UnicodeDecodeError):
        return file.read_text(encoding="utf-8").splitlines()
    return []


def _value(leaf: Any, *, bits: bool) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    if bits:
        return digest(leaf)
    return f"norm {float(leaf.double().norm())!r}"
