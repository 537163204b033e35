"""Formats by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.arrow import ArrowSource
from samestep.data.streams.formats.litdata import LitDataSource
from samestep.data.streams.formats.mds import MdsSource
from samestep.data.streams.formats.parquet import ParquetSource
from samestep.data.streams.formats.tokens import TokenSource
from samestep.data.streams.formats.webdataset import WebDatasetSource
from samestep.data.streams.source import IndexedSource
from samestep.errors import DataError

FORMATS: Mapping[str, Callable[..., IndexedSource[Any]]] = {
    "mds": MdsSource,
    "litdata": LitDataSource,
    "parquet": ParquetSource,
    "arrow": ArrowSource,
    "webdataset": WebDatasetSource,
    "tokens": TokenSource,
}


def open_source(kind: str, folder: StreamFolder, **options: Any) -> IndexedSource[Any]:
    """Return the samples of a folder.

    Args:
        kind: a key of `FORMATS`.
        folder: the folder.
        options: options of the format, such as `length` of `tokens`.

    Raises:
        DataError: the format or an option is unknown, or the files cannot be read.
    """
    if kind not in FORMATS:
        raise DataError(
            f"the format {kind!r}",
            expected=f"one of {', '.join(FORMATS)}",
            fix="correct the name",
            code="E_UNKNOWN_NAME",
        )
    known = list(inspect.signature(FORMATS[kind]).parameters)[1:]
    if unknown := [name for name in options if name not in known]:
        raise DataError(
            f"the format {kind} has no option {', '.join(unknown)}",
            expected=f"one of {', '.join(known) or '(none)'}",
            fix="remove the option",
            code="E_UNKNOWN_OPTION",
        )
    missing = [name for name in required_options(kind) if name not in options]
    if missing:
        raise DataError(
            f"the format {kind} needs {', '.join(missing)}",
            expected="a value; this option has no default",
            fix=f"set {missing[0]}",
            code="E_MISSING_KEY",
        )
    return FORMATS[kind](folder, **options)


def required_options(kind: str) -> list[str]:
    """Return the names of the options of a format that have no default."""
    parameters = list(inspect.signature(FORMATS[kind]).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
