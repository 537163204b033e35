"""Encodings of columns, and contents of one MDS file, equal to those of MosaicML Streaming's `MDSWriter`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy

from samestep.data.streams.formats.mds import WRITABLE, encode, encoding_of, fixed_size
from samestep.errors import DataError

_MAX_BYTES = 1 << 32  # offsets have 32 bits


def encodings_of(first: Mapping[str, Any], encodings: Mapping[str, str]) -> dict[str, str]:
    """Return the encodings of the columns of the first sample, sorted by name as MDS files have them."""
    if unknown := sorted(set(encodings) - set(first)):
        raise DataError(
            f"the first sample has no column {', '.join(unknown)}",
            expected=f"columns of the samples: {', '.join(first)}",
            fix="correct --column",
            code="E_COLUMN",
        )
    if invalid := sorted(set(encodings.values()) - set(WRITABLE)):
        raise DataError(
            f"--column with the encoding {', '.join(invalid)}",
            expected=f"one of {', '.join(WRITABLE)}",
            fix="leave --column out for the encoding of the first sample",
            code="E_VALUE",
        )
    return {name: encodings.get(name) or _encoding_of(name, first[name]) for name in sorted(first)}


def _encoding_of(name: str, value: object) -> str:
    try:
        return encoding_of(value)
    except TypeError as error:
        raise DataError(
            f"sample 0, column {name}: {error}",
            expected="dense tensors of integers or of floats of 16, 32 or 64 bits",
            fix="convert the tensor in the source: tensor.float(), tensor.to_dense()",
        ) from error


class MdsFile:
    """File that is filled with encoded samples.

    Attributes:
        samples: the encoded samples.

    Args:
        columns: encoding of each column, sorted by name.
        limit: maximum size in bytes.
    """

    def __init__(self, columns: Mapping[str, str], limit: int) -> None:
        self._columns, self._limit = dict(columns), limit
        self._facts = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": limit,
            "column_names": list(columns),
            "column_encodings": list(columns.values()),
            "column_sizes": [fixed_size(encoding) for encoding in columns.values()],
        }
        self._header = json.dumps(self._facts, sort_keys=True).encode()
        self.clear()

    def encode(self, sample: Mapping[str, Any], number: int) -> bytes:
        """Return the bytes of a sample; `number` is its position, for errors.

        Raises:
            DataError: the columns differ from those of the first sample, or a value has another type.
        """
        if sample.keys() != self._columns.keys():
            raise DataError(
                f"sample {number:,} has the columns {', '.join(sorted(sample)) or '(none)'}",
                expected=f"those of the first sample: {', '.join(self._columns)}",
                fix="give all samples the same columns",
                code="E_COLUMN",
            )
        sizes, values = [], []
        for name, encoding in self._columns.items():
            try:
                values.append(encode(encoding, sample[name]))
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"sample {number:,}, column {name}: {error}",
                    expected=f"values of the encoding {encoding}, which the first sample or --column has selected",
                    fix=f"correct the values, or --column {name}=json",
                ) from error
            if fixed_size(encoding) is None:
                sizes.append(len(values[-1]))
        data = numpy.array(sizes, "<u4").tobytes() + b"".join(values)
        if len(data) + 12 + len(self._header) >= _MAX_BYTES:
            raise DataError(f"sample {number:,} has {len(data):,} bytes", "less than 4 GiB", "divide the sample")
        return data

    def is_full_with(self, data: bytes) -> bool:
        """Return whether the file has samples and would exceed the limit with another one."""
        return bool(self.samples) and self._size + len(data) + 4 > self._limit

    def add(self, data: bytes) -> None:
        """Add an encoded sample."""
        self.samples.append(data)
        self._size += len(data) + 4

    def contents(self) -> bytes:
        """Return the contents of the file."""
        begin = 4 * (len(self.samples) + 2) + len(self._header)
        offsets = begin + numpy.cumsum([0, *map(len, self.samples)])
        numbers = numpy.array([len(self.samples), *offsets], "<u4")
        return numbers.tobytes() + self._header + b"".join(self.samples)

    def description(self, name: str, data: bytes) -> dict[str, Any]:
        """Return the entry of the file in the index; `data` are its contents."""
        part = {"basename": name, "bytes": len(data), "hashes": {"sha256": sha256(data).hexdigest()}}
        return {**self._facts, "samples": len(self.samples), "raw_data": part, "zip_data": None}

    def clear(self) -> None:
        """Begin the next file."""
        self.samples: list[bytes] = []
        self._size = 8 + len(self._header)
