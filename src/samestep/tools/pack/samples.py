"""Samples to pack: of a function, a file of lines, or a folder of another format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.open import open_source
from samestep.data.streams.source import IndexedSource
from samestep.errors import DataError
from samestep.recipes.builder import find

Samples = Callable[[int], Iterator[Any]]  # from the number of the first sample


def samples_of(source: str, kind: str | None, options: Mapping[str, Any]) -> Samples:
    """Return the samples of SRC of `samestep pack`.

    Args:
        source: a folder if `kind` is set; otherwise a file `.jsonl` or `.txt`, or an import path `module:function` of a
            function that returns an iterable.
        kind: format of the folder, or None.
        options: options of the format, or arguments of the function.

    Raises:
        InputError: there is no such file, folder, function or format.
    """
    if kind is not None:
        opened = open_source(kind, StreamFolder(source), **options)
        return lambda first: _read(opened, first)
    path = Path(source)
    if path.suffix in (".jsonl", ".txt"):
        if not path.is_file():
            raise DataError(f"there is no file {path}", "a file of lines", "correct the path", code="E_FILE_MISSING")
        return lambda first: islice(_lines(path), first, None)
    if ":" not in source:
        raise DataError(
            f"source {source!r} is unknown",
            expected="a file .jsonl or .txt, a folder with --from FORMAT, or module:function of an iterable of samples",
            fix="write the samples to a .jsonl file, or --from FORMAT for a folder",
            code="E_UNKNOWN_NAME",
        )
    function = find(source, {}, "source")
    return lambda first: islice(_iterate(function(**options), source), first, None)


def columns_of(sample: Any) -> dict[str, Any]:
    """Return a sample as values with names: `text` or `value` alone, and numbers for the elements of a tuple."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        return {str(number): value for number, value in enumerate(sample)}
    return {"text" if isinstance(sample, str) else "value": sample}


def _read(source: IndexedSource[Any], first: int) -> Iterator[Any]:
    begin = 0
    for file, end in enumerate(accumulate(source.sizes)):
        for index in range(max(first - begin, 0), source.sizes[file]):
            yield source.read(file, index)
        begin = end


def _lines(path: Path) -> Iterator[Any]:
    is_text = path.suffix == ".txt"
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
                if not is_text and not text.strip():
                    continue
                sample = {"text": text} if is_text else json.loads(text)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: {error}",
                    expected="UTF-8 text" if is_text else "a JSON value per line, as UTF-8 text",
                    fix="correct the line",
                    code="E_UNREADABLE",
                ) from error
            yield sample


def _iterate(value: Any, source: str) -> Iterable[Any]:
    if not isinstance(value, Iterable):
        raise DataError(
            f"{source} returned a value of the type {type(value).__name__}",
            expected="an iterable of samples, in the same order in each call",
            fix="return a list, a generator or a dataset",
        )
    return value
