"""Rows of Arrow tables as Python values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from samestep.errors import DataError


def require_pyarrow(needed_by: str) -> Any:
    """Return the module pyarrow.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{needed_by} need pyarrow: {error}",
            expected="the optional package pyarrow",
            fix="pip install 'samestep[streams]'",
            code="E_NOT_INSTALLED",
        ) from error
    return pyarrow


def require_columns(columns: Iterable[str], known: Collection[str], name: str) -> None:
    """Require that a file has all selected columns; `name` is for errors.

    Raises:
        DataError: it has not.
    """
    if unknown := [column for column in columns if column not in known]:
        raise DataError(
            f"{name} has no column {', '.join(map(str, unknown))}",
            expected=f"columns of the file: {', '.join(known)}",
            fix="correct the option columns",
            code="E_COLUMN",
        )


def row_of(table: Any, index: int) -> dict[str, Any]:
    """Return one row of a table or record batch, with a Python value per column."""
    row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    return row
