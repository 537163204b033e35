"""Index files of a folder: those of other libraries as JSON, and ours for formats without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.data.streams.data_file import DataFile, damaged_file, missing_file
from samestep.data.streams.folder import StreamFolder

INDEX = "samestep-index.json"
PATTERNS = {"webdataset": "*.tar", "parquet": "*.parquet", "arrow": "*.arrow", "tokens": "*.bin"}
_VERSION = 1


def read_json(folder: StreamFolder, name: str) -> dict[str, Any]:
    """Return the contents of an index file.

    Raises:
        DataError: the file is missing, or is not a JSON object.
    """
    data = folder.read(name)
    if data is None:
        raise missing_file(f"{folder.address}/{name}")
    try:
        content = json.loads(data)
    except ValueError as error:
        raise damaged_file(f"{folder.address}/{name}", str(error)) from error
    if not isinstance(content, dict):
        raise damaged_file(f"{folder.address}/{name}", "it is not a JSON object")
    return content


def list_files(folder: StreamFolder, kind: str) -> list[DataFile]:
    """Return the files of a format without an index of its own, sorted by name.

    Hugging Face `map` and `shuffle` write Arrow files of their caches into a folder of `save_to_disk`: the samples are
    those of the files in its `state.json`.

    Raises:
        DataError: there are no such files, or `state.json` is damaged or names a file that does not exist.
    """
    files = folder.find(PATTERNS[kind])
    if kind != "arrow":
        return files
    selected: list[DataFile] = []
    for parent in sorted({_parent(file) for file in files}):
        present = {file.name: file for file in files if _parent(file) == parent}
        for name in _names_in_state(folder, parent, list(present)):
            if name not in present:
                raise missing_file(f"{folder.address}/{name}")
            selected.append(present[name])
    return sorted(selected, key=lambda file: file.name)


def _parent(file: DataFile) -> str:
    return "".join(file.name.rpartition("/")[:2])


def _names_in_state(folder: StreamFolder, parent: str, present: list[str]) -> list[str]:
    """Return the names of the files of a dataset that Hugging Face has saved, or `present` in other folders."""
    name = f"{parent}state.json"
    state = {} if folder.read(name) is None else read_json(folder, name)
    if "_data_files" not in state:
        return present
    try:
        return [f"{parent}{row['filename']}" for row in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise damaged_file(f"{folder.address}/{name}", f"{type(error).__name__}: {error}") from error


def find_files(folder: StreamFolder, kind: str) -> tuple[list[DataFile], list[int] | None]:
    """Return the files of a format without an index of its own, and their sizes in samples if our index has them.

    Raises:
        DataError: there are no such files, or the index is damaged or belongs to another format.
    """
    if folder.read(INDEX) is None:
        return list_files(folder, kind), None
    content = read_json(folder, INDEX)
    try:
        if (content["version"], content["format"]) != (_VERSION, kind):
            raise ValueError(f"it has the version {content['version']} and the format {content['format']!r}")
        rows = content["files"]
        files = [
            DataFile(safe_name(folder, INDEX, row["name"]), int(row["bytes"]), str(row["checksum"])) for row in rows
        ]
        return files, [int(row["samples"]) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_file(f"{folder.address}/{INDEX}", f"{error}, in an index of {kind} files") from error


def index_text(kind: str, files: list[DataFile], sizes: list[int]) -> str:
    """Return the contents of our index."""
    rows = [
        {"name": file.name, "bytes": file.bytes, "samples": size, "checksum": file.checksum}
        for file, size in zip(files, sizes, strict=True)
    ]
    return json.dumps({"version": _VERSION, "format": kind, "files": rows}, indent=1) + "\n"


def safe_name(folder: StreamFolder, index: str, name: Any) -> str:
    """Return the name of a file in an index, which must not lead out of the folder.

    Raises:
        DataError: it does.
    """
    parts = Path(str(name)).parts
    if not isinstance(name, str) or not parts or parts[0] == "/" or ".." in parts:
        raise damaged_file(f"{folder.address}/{index}", f"{name!r} is not the name of a file in the folder")
    return name
