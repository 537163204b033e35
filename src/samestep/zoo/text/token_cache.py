"""Tokens of text files in a memory-mapped file, named by a hash of tokenizer and texts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from samestep.checkpoint.files import replacing
from samestep.errors import DataError
from samestep.zoo.text.tokenizer import Tokenizer

CACHE = ".samestep-cache"
_MAX_2_BYTES = 2**16
_CACHE_FORMAT = 1  # part of the file name; a change makes existing files unused
Tokens = NDArray[Any]


class Document(NamedTuple):
    """Text file."""

    name: str  # path below the dataset's folder, equal on all machines
    path: Path
    digest: str  # SHA-256 of the content
    size: int  # size in bytes


def read_document(path: Path, name: str) -> Document:
    """Return name, size and hash of a file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return Document(name, path, hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            expected="readable files",
            fix="correct the permissions, or remove the file",
            code="E_UNREADABLE",
        ) from error


def cached_tokens(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path) -> Tokens:
    """Return the tokens of all documents in order, each followed by the end token, as a memory-mapped file.

    The file name is a hash of the tokenizer and of the names and contents of the documents. The file is written under
    another name and renamed, so processes can write it at the same time without waiting: their contents are equal.

    Raises:
        DataError: a document is not text, the tokenizer has no end token, or `folder` is not writable.
    """
    dtype = numpy.dtype("<u2" if tokenizer.size <= _MAX_2_BYTES else "<u4")
    key = [_CACHE_FORMAT, tokenizer.digest, tokenizer.end, [(document.name, document.digest) for document in documents]]
    path = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.{dtype.str[1:]}"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, temporary.open("wb") as file:
                for row in _encoded(documents, tokenizer):
                    file.write(numpy.array(row, dtype=dtype).tobytes())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error.strerror}",
                expected="a writable folder for tokens",
                fix="--set data.options.cache=FOLDER",
                code="E_OUTPUT",
            ) from error
    if not path.stat().st_size:
        return numpy.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return numpy.memmap(path, dtype=dtype, mode="r")


def _encoded(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each document that is not empty."""
    if tokenizer.end is None:
        raise DataError(
            "the tokenizer has no end-of-text token",
            expected="a token that separates documents, such as <|endoftext|>",
            fix="add the token to the special tokens of the tokenizer",
            code="E_TOKENIZER",
        )
    for document in documents:
        try:
            tokens = tokenizer.encode(document.path.read_bytes())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{document.path} is not text: {error.reason} at byte {error.start}",
                expected="UTF-8, with a tokenizer from a file",
                fix="convert or remove the file, or use bytes: data.options.tokenizer: null",
                code="E_UNREADABLE",
            ) from error
        if tokens:
            yield [*tokens, tokenizer.end]
