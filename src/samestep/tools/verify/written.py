"""Files that an unchanged script writes in a trial: their contents for the comparison, and what was there before.

A trial ends without traces: its files are removed, and changed or removed ones are put back.
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

from samestep.launcher.job import process_state, rank_and_size
from samestep.script.file_functions import Replaced
from samestep.script.file_journal import PATHS, Journal, copy_file
from samestep.script.files import FirstWriter
from samestep.script.replaced import replaced
from samestep.tools.verify.tensor_comparison import digest, leaves

_JOURNAL = "written.jsonl"
_ABSENT, _FILE, _FOLDER, _LINK = "absent", "file", "folder", "link"  # what was at a path
_OWN_NUMBER = re.compile(r"\d{4,}")  # a process id or a time in the name of a file


@contextmanager
def noted_files(folder: Path, scratch: Path) -> Iterator[None]:
    """Note and keep what is at each path of rank 0 before its first change, during the block.

    Args:
        folder: folder of the trial, with its own files.
        scratch: folder of the script in it.
    """
    rank, size = rank_and_size()
    if rank > 0:
        yield
        return
    journal = Journal(str(folder / _JOURNAL))
    own = os.path.realpath(folder) + os.sep
    inside = os.path.realpath(scratch) + os.sep
    seen: set[str] = set()
    change = FirstWriter._change

    def noted(self: FirstWriter, path: Any, *, follow: bool = True, **options: bool) -> str:
        name = self._name(path, follow=follow) if isinstance(path, PATHS) else ""
        is_own = not name or self._exempt.covers(name) or (name.startswith(own) and not name.startswith(inside))
        if not is_own and name not in seen:
            seen.add(name)
            journal.append(name, *_kept(name, folder / f"before-{len(seen)}"))
        return change(self, path, follow=follow, **options)

    with ExitStack() as stack:
        stack.enter_context(replaced(FirstWriter, _change=noted))
        if size == 1:  # no other rank needs a replacement of the functions of files
            assert process_state.worker is not None
            (folder / "writer").mkdir()
            functions = Replaced(FirstWriter(str(folder / "writer"), sys.maxsize))
            stack.callback(functions.undo)
        yield


def _kept(name: str, copy: Path) -> tuple[str, str]:
    """Return what is at a path, and where its content is kept, or the target of a link."""
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


def put_back(folder: Path) -> None:
    """Undo the changes of the trial in a folder."""
    for name, kind, content in reversed(_entries(folder)):
        if kind == _FOLDER:
            os.makedirs(name, exist_ok=True)
            continue
        if os.path.isdir(name) and not os.path.islink(name):
            with suppress(OSError):  # with files that are not known
                os.rmdir(name)
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(name)
        if kind == _LINK:
            os.symlink(content, name)
        elif kind == _FILE:
            shutil.copy2(content, name)


def _entries(folder: Path) -> list[list[str]]:
    journal = folder / _JOURNAL
    return list(map(json.loads, journal.read_text(encoding="utf-8").splitlines())) if journal.exists() else []


def describe_files(folder: Path, scratch: Path, start: Path, *, bits: bool) -> list[str]:
    """Return the lines of all files that rank 0 has written, and the tensors of those of `torch.save`.

    Of other binary files only the name is compared.

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
        except Exception as error:  # boundary: of another program, or objects of the script, which are not loaded
            return [f"not compared: {type(error).__name__}"]
        return [f"{path} {_value(leaf, bits=bits)}" for path, leaf in leaves(saved)]
    with suppress(UnicodeDecodeError):
        return file.read_text(encoding="utf-8").splitlines()
    return []


def _value(leaf: Any, *, bits: bool) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return digest(leaf) if bits else f"norm {float(leaf.double().norm())!r}"
