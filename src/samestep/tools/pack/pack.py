"""Packing of samples into MDS files, which can be continued after a kill with the same bytes.

`pack.json` is the journal: a file is in it when it is complete on the disk. `index.json`, without which no reader
accepts the folder, is written last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import make_folder, remove, replacing, sync_folder, write_atomically, write_file
from samestep.checkpoint.lock import LOCK, FolderLock
from samestep.data.streams.data_file import DataFile, difference
from samestep.data.streams.formats.mds import INDEX
from samestep.errors import DataError, InputError, RunError
from samestep.tools.pack.mds_file import MdsFile, encodings_of
from samestep.tools.pack.samples import Samples, columns_of

JOURNAL = "pack.json"
_VERSION = 1


@dataclass(frozen=True)
class Packed:
    """Result of `pack`.

    Attributes:
        samples: number of samples.
        files: number of files.
        bytes: size of all files.
        kept_samples: samples of files that an earlier, interrupted command has written.
        columns: encoding of each column.
    """

    samples: int
    files: int
    bytes: int
    kept_samples: int
    columns: dict[str, str]


def pack(
    samples: Samples,
    folder: Path,
    *,
    source: str,
    encodings: Mapping[str, str],
    file_bytes: int,
    report: Callable[[str], None],
) -> Packed:
    """Write samples to MDS files; continue an interrupted command with the same arguments.

    Args:
        samples: the samples, from the number of the first one; the same in each call.
        folder: a new or empty folder, or one of an interrupted command.
        source: name of the samples, for the journal.
        encodings: encodings of columns; those of others follow from the first sample.
        file_bytes: maximum size of a file; a larger sample has a file of its own.
        report: receives a line of progress per file.

    Raises:
        InputError: the folder has other contents, or a sample cannot be encoded.
        RunError: the disk failed.
    """
    with _new_folder(folder), FolderLock(folder):
        facts = {"version": _VERSION, "source": source, "encodings": dict(encodings), "file_bytes": file_bytes}
        journal = _journal(folder, facts)
        files: list[dict[str, Any]] = list(takewhile(lambda file: _is_intact(folder, file), journal["files"]))
        kept = sum(file["samples"] for file in files)
        if journal["complete"] and len(files) == len(journal["files"]):
            for _ in _samples_after(samples, files, MdsFile(journal["columns"], file_bytes)):
                raise _changed_source(f"the source has more than the {kept:,} samples that were packed")
            write_atomically(folder / INDEX, _index_text(files))  # it may have been removed
        else:
            remove(folder / INDEX)
            _write_rest(samples, folder, facts, journal["columns"], files, report)
            journal = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
            files = journal["files"]
        sizes = [file["raw_data"]["bytes"] for file in files]
        total = sum(file["samples"] for file in files)
        return Packed(total, len(files), sum(sizes), kept, journal["columns"])


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Create a folder; remove a new one that contains no files of samples after a failure of the block."""
    is_new = not folder.exists()
    make_folder(folder)
    try:
        yield
    except BaseException:
        if is_new and not {path.name for path in folder.iterdir()} - {LOCK}:
            remove(folder)
        raise


def _journal(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the journal of an interrupted command with the same arguments, or a new one."""
    path = folder / JOURNAL
    if not path.exists():
        if others := sorted(
            entry.name for entry in folder.iterdir() if entry.name not in (LOCK, f".{JOURNAL}.writing")
        ):
            raise _other_contents(folder, f"contains {others[0]}")
        return {"columns": {}, "files": [], "complete": False}
    try:
        journal: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, value in facts.items() if journal[name] != value]
    except (ValueError, KeyError, TypeError) as error:
        raise _other_contents(folder, f"has a damaged {JOURNAL}: {error}") from error
    if differing:
        values = ", ".join(f"{name} {journal[name]!r}, not {facts[name]!r}" for name in differing)
        raise _other_contents(folder, f"belongs to another command: {values}")
    return journal


def _other_contents(folder: Path, problem: str) -> InputError:
    return InputError(
        f"{folder} {problem}",
        expected="an empty folder, or one of an interrupted command with the same arguments",
        fix="another folder, or remove this one",
        code="E_OUTPUT",
    )


def _is_intact(folder: Path, file: Mapping[str, Any]) -> bool:
    data = file["raw_data"]
    try:
        return not difference(
            folder / data["basename"], DataFile(data["basename"], data["bytes"], f"sha256:{data['hashes']['sha256']}")
        )
    except FileNotFoundError:
        return False


def _write_rest(
    samples: Samples,
    folder: Path,
    facts: Mapping[str, Any],
    columns: dict[str, str],
    files: list[dict[str, Any]],
    report: Callable[[str], None],
) -> None:
    """Write the samples after those of `files`, the journal after each file, and the index."""
    complete_names = {file["raw_data"]["basename"] for file in files}
    for entry in folder.iterdir():  # files of a killed command that are not in the journal
        if entry.name.lstrip(".").startswith("shard.") and entry.name not in complete_names:
            remove(entry)
    number = sum(file["samples"] for file in files)
    if files:
        opened = MdsFile(columns, facts["file_bytes"])
        rest = _samples_after(samples, files, opened)
    else:
        rest = samples(0)
        first = next(rest, None)
        if first is None:
            raise DataError(
                "the source has no samples", "at least one sample", "correct the source", code="E_EMPTY_DATASET"
            )
        columns = encodings_of(columns_of(first), facts["encodings"])
        rest = chain((first,), rest)
        opened = MdsFile(columns, facts["file_bytes"])

    def write(complete: bool) -> None:
        if opened.samples:
            files.append(_write_file(folder, len(files), opened))
            report(f"{files[-1]['raw_data']['basename']}: {number:,} samples")
            opened.clear()
        journal = {**facts, "columns": columns, "complete": complete, "files": files}
        if complete:
            write_atomically(folder / INDEX, _index_text(files))
        write_atomically(folder / JOURNAL, json.dumps(journal, indent=1) + "\n")

    for sample in rest:
        data = opened.encode(columns_of(sample), number)
        if opened.is_full_with(data):
            write(complete=False)
        opened.add(data)
        number += 1
    write(complete=True)


def _samples_after(samples: Samples, files: list[dict[str, Any]], opened: MdsFile) -> Iterator[Any]:
    """Return the samples after those of `files`, whose last one the source must yield again.

    Raises:
        DataError: the source has changed.
    """
    last = sum(file["samples"] for file in files) - 1
    rest = samples(last)
    for sample in islice(rest, 1):
        if sha256(opened.encode(columns_of(sample), last)).hexdigest() == files[-1]["last_sample"]:
            return rest
    raise _changed_source(f"sample {last:,} is missing or differs from the one that an earlier command has packed")


def _changed_source(problem: str) -> DataError:
    return DataError(
        problem,
        expected="the same samples in the same order in each iteration of the source",
        fix="make the order of the source deterministic; remove the folder, and pack again",
    )


def _write_file(folder: Path, number: int, opened: MdsFile) -> dict[str, Any]:
    name, data = f"shard.{number:05d}.mds", opened.contents()
    try:
        with replacing(folder / name) as temporary:
            write_file(temporary, data)
        sync_folder(folder)
    except OSError as error:
        raise RunError(
            f"{folder / name} cannot be written: {error.strerror or error}",
            expected="a folder that can be written, with enough space",
            fix="free space, and repeat the command: complete files are kept",
            code="E_OUTPUT",
        ) from error
    return {**opened.description(name, data), "last_sample": sha256(opened.samples[-1]).hexdigest()}


def _index_text(files: list[dict[str, Any]]) -> str:
    shards = [{key: value for key, value in file.items() if key != "last_sample"} for file in files]
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True)
