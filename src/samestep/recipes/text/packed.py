"""The tokens of many documents in one row, in a file that is mapped into memory and made once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from samestep.errors import DataError
from samestep.recipes.text.tokenizer import Tokenizer

_FORM = 1  # of the file; another one makes all of them anew
_SMALL = 2**16

Tokens = NDArray[Any]


class Document(NamedTuple):
    """A file of text.

    Attributes:
        name: what it is called below its folder, the same on every machine.
        digest: of what is in it.
    """

    name: str
    path: Path
    digest: str
    size: int


def read_document(path: Path, name: str) -> Document:
    """What identifies a file; all of it is read, nothing kept.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return Document(name, path, hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", rule="every file is readable", do="look at its permissions"
        ) from error


def packed_tokens(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path) -> Tokens:
    """The tokens of all documents in their order, the tokenizer's `end` after each; mapped from a file in `folder`.

    The file is named by a hash of tokenizer, names and contents. It is written aside and renamed, so that any number
    of processes may make it at the same time without waiting for each other: they write the same, and whoever comes
    later finds it whole.

    Raises:
        DataError: a document is not text, the tokenizer has no `end`, or the folder cannot be written to.
    """
    kind = numpy.dtype("<u2" if tokenizer.size <= _SMALL else "<u4")
    path = folder / f"{_key(documents, tokenizer)}.{kind.str[1:]}"
    if not path.exists():
        try:
            _write(path, _encoded(documents, tokenizer), kind)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written: {error.strerror}",
                rule="packed tokens are kept in a folder",
                do="--set data.options.cache=FOLDER",
            ) from error
    if not path.stat().st_size:
        return numpy.zeros(0, dtype=kind)  # an empty file cannot be mapped
    return numpy.memmap(path, dtype=kind, mode="r")


def _key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    facts = [_FORM, tokenizer.digest, tokenizer.end, [(document.name, document.digest) for document in documents]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _encoded(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of one document after the other; one without any adds nothing."""
    if tokenizer.end is None:
        raise DataError(
            "the tokenizer has no token that ends a text",
            rule="documents in a row are told apart by one, such as <|endoftext|>",
            do="add it to the tokenizer's special tokens",
        )
    for document in documents:
        try:
            tokens = tokenizer.encode(document.path.read_bytes())
        except UnicodeDecodeError as error:
            raise DataError(
                f"{document.path} is not text: {error.reason} at byte {error.start}",
                rule="with a tokenizer of a file, documents are UTF-8",
                do="convert or remove the file, or take bytes: tokenizer: null",
            ) from error
        if tokens:
            yield [*tokens, tokenizer.end]


def _write(path: Path, rows: Iterator[list[int]], kind: numpy.dtype[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    number, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            for row in rows:
                file.write(numpy.array(row, dtype=kind).tobytes())
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)  # as files are; one written aside is its owner's alone
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
