"""Texts of a trial, compared by the numbers in them: printed lines, and files that rank 0 writes.

The end of a trial restores the previous state of the files: new ones are removed, and changed or
removed ones are copied back.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from samestep.launcher.process_state import rank_and_size
from samestep.script.file_journal import Journal, copy_file
from samestep.script.first_writer import FirstWriter
from samestep.script.patches import PATHS, Replaced, replaced
from samestep.tools.verify.tensor_comparison import digest, leaves

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\bnan\b|\binf\b")
_UNIT = r"(?:s|ms|us|µs|ns|sec|secs|seconds|min|minutes)"
# A rate, a time, or a part of the date.
_TIME = re.compile(
    rf"[-+]?\d+(?:\.\d+)?\s?{_UNIT}?\s?/?\s?(?:it|samples|images|tokens)?/s\b"
    rf"|[-+]?\d+(?:\.\d+)?\s?{_UNIT}\b"
    r"|\d+(?::\d\d)+(?:\.\d+)?|\d{4}-\d\d-\d\d"
)
_FACTOR = 16.0  # as for other quantities
_OWN_NUMBER = re.compile(r"\d{4,}")  # a process id or a time in the name of a file
_JOURNAL = "written.jsonl"


@dataclass(frozen=True)
class Printed:
    """Lines of the reference, and of another run that equals it: other numbers are no results."""

    lines: Sequence[str]
    repeated: Sequence[str]


def numbers_of(line: str) -> tuple[str, list[str]]:
    """Return a line without numbers and times, and its numbers as text."""
    line = _TIME.sub("<time>", line)
    return _NUMBER.sub("<number>", line), _NUMBER.findall(line)


def differing_lines(
    printed: Printed, other: Sequence[str], *, is_exact: bool
) -> Iterator[tuple[str, float | None]]:
    """Yield both texts of each line that differs, with the largest measured distance of numbers.

    Equal text is required if `is_exact`, and otherwise numbers that are equal to rounding.
    """
    if len(printed.lines) != len(other) and len(printed.lines) == len(printed.repeated):
        yield f"{len(printed.lines)} lines and {len(other)} lines", None
        return
    for line, repeated, actual in zip_longest(printed.lines, printed.repeated, other):
        if line is None or repeated is None or actual is None or line == actual:
            continue
        words, numbers = numbers_of(line)
        other_words, others = numbers_of(actual)
        repeated_words, repeated_numbers = numbers_of(repeated)
        if words != repeated_words or len(numbers) != len(repeated_numbers):
            continue  # text of one run, such as a path
        detail = f"{line.strip()!r} and {actual.strip()!r}"
        if words != other_words:
            yield detail, None
            continue
        triples = zip(numbers, repeated_numbers, others, strict=True)
        size = max((_distance(*texts, is_exact=is_exact) for texts in triples), default=0.0)
        if size > 0:
            yield detail, size


def _distance(text: str, repeated: str, other: str, *, is_exact: bool) -> float:
    """Return the relative distance of two numbers, less that of two equal runs; 0 if equal."""
    if text == other:
        return 0.0
    value = float(text)
    actual = float(other)
    varies = abs(value - float(repeated))
    if is_exact:
        return float(not varies)  # numbers that vary between equal runs are no results
    digits = 0
    if "e" not in text.lower():
        digits = len(text.partition(".")[2])
    # A printed number is rounded to its last digit; the distance of integers is never rounding.
    last_digit = 10.0**-digits * (digits > 0)
    # 1.01: the difference of two decimal numbers is rounded, too.
    difference = abs(value - actual) - _FACTOR * varies - 1.01 * last_digit
    if math.isnan(difference):
        return float(not (math.isnan(value) and math.isnan(actual)))
    if difference <= 0:  # also of 0 and -0, which differ as texts alone
        return 0.0
    return difference / max(abs(value), abs(actual))


@contextmanager
def recorded_files(folder: Path, scratch: Path) -> Iterator[None]:
    """Record the state of each path before rank 0 changes it for the first time, during the block.

    The records belong to the `folder` of the trial. The script's folder in it is `scratch`, whose
    files count as those of the script.
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
        name = ""
        if isinstance(path, PATHS):
            name = self._name(path, follow=follow)
        is_own = name.startswith(own) and not name.startswith(inside)
        if name and not self._exempt.covers(name) and not is_own and name not in recorded:
            recorded.add(name)
            journal.append(name, *_state(name, folder / f"before-{len(recorded)}"))
        return change(self, path, follow=follow, **options)

    with ExitStack() as stack:
        stack.enter_context(replaced(FirstWriter, _change=recording))
        if size == 1:  # no other rank needs a replacement of the functions of files
            (folder / "writer").mkdir()
            functions = Replaced(FirstWriter(str(folder / "writer"), sys.maxsize))
            stack.callback(functions.undo)
        yield


def _state(name: str, copy: Path) -> tuple[str, str]:
    """Return the kind of a path, and the path of a copy of a file, or the target of a link."""
    try:
        mode = os.lstat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent", ""
    if stat.S_ISLNK(mode):
        return "link", os.readlink(name)
    if stat.S_ISDIR(mode):
        return "folder", ""
    # Without a limit of size: the file must be restored.
    copy_file(name, str(copy), float("inf"))
    return "file", str(copy)


def _entries(folder: Path) -> list[list[str]]:
    """Return path, kind and copy or target of changed paths, in the order of the first changes."""
    journal = folder / _JOURNAL
    if journal.exists():
        return list(map(json.loads, journal.read_text(encoding="utf-8").splitlines()))
    return []


def restore_files(folder: Path) -> None:
    """Restore the state of all paths before the trial in a folder."""
    # In reverse: a new folder is empty again before its own turn.
    for name, kind, content in reversed(_entries(folder)):
        if kind == "folder":
            os.makedirs(name, exist_ok=True)
            continue
        if os.path.isdir(name) and not os.path.islink(name):
            with suppress(OSError):  # it contains files without a record
                os.rmdir(name)
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(name)
        if kind == "link":
            os.symlink(content, name)
        elif kind == "file":
            shutil.copy2(content, name)


def describe_files(folder: Path, scratch: Path, start: Path, *, bits: bool) -> list[str]:
    """Describe all files that rank 0 has written: lines of text, and tensors of `torch.save`.

    Other binary files have a line with their name only. Names are relative to the script's folder
    `scratch` in the folder of the trial, or to `start`, the script's working directory at its
    start. With `bits`, tensors have a hash, and otherwise their norm.
    """
    names = {name for name, *_ in _entries(folder) if os.path.isfile(name)}
    inside = os.path.realpath(scratch)
    lines = []
    for name in sorted(names):
        base = str(start.resolve())
        if name.startswith(inside + os.sep):
            base = inside
        label = _OWN_NUMBER.sub("#", os.path.relpath(name, base))
        lines += [f"{label}:", *(f"{label}: {line}" for line in _content(Path(name), bits=bits))]
    return lines


def _content(file: Path, *, bits: bool) -> list[str]:
    if not zipfile.is_zipfile(file):  # `torch.save` writes zip files
        with suppress(UnicodeDecodeError):
            return file.read_text(encoding="utf-8").splitlines()
        return []
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # boundary: file of another program, or with objects of the script
        return [f"not compared: {type(error).__name__}"]
    lines = []
    for path, leaf in leaves(saved):
        if not isinstance(leaf, torch.Tensor):
            value = repr(leaf)
        elif bits:
            value = digest(leaf)
        else:
            value = f"norm {float(leaf.double().norm())!r}"
        lines.append(f"{path} {value}")
    return lines
