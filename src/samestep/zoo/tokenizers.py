"""Tokenizers: bytes, or files of the tokenizers and transformers libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samestep.errors import DataError
from samestep.zoo.options import import_optional, unusable

if TYPE_CHECKING:
    import tokenizers

_BYTES = 256
# Names of the end-of-text and padding tokens of well-known tokenizers, in order of precedence.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PADDINGS = ("[PAD]", "<pad>", "<|pad|>")


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8 and one end token, which needs no file.

    Attributes:
        size: number of tokens.
        end: token after each document, if the tokenizer has one.
        padding: padding token; `size` if the tokenizer has none.
        digest: hash of the tokenizer's behaviour.

    Args:
        max_tokens: maximum length of framed texts.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self.size = _BYTES + 1
        self.padding = _BYTES + 1
        self.digest = "bytes"
        self.end: int | None = _BYTES

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a UTF-8 text, without special tokens or truncation."""
        return list(text)

    def encode_framed(self, text: str) -> list[int]:
        """Return the tokens of a text for a classifier, truncated and with special tokens."""
        # Classifiers read the first position, which must not be part of the text.
        content = text.encode()
        if self._max_tokens is not None:
            content = content[: self._max_tokens - 2]
        return [_BYTES, *content, _BYTES]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")

    def name(self, token: int) -> str:
        """Return the name of a token."""
        if token == _BYTES:
            return "end"
        if 0x20 < token < 0x7F:
            return chr(token)
        return f"0x{token:02x}"


class FileTokenizer:
    """Tokenizer of the `tokenizers` library, with the attributes and methods of `ByteTokenizer`.

    `encode` raises `UnicodeDecodeError` for text that is not UTF-8.

    Args:
        backend: tokenizer; its own padding and truncation are disabled.
        max_tokens: maximum length of framed texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer, max_tokens: int | None = None) -> None:
        numbers = backend.get_vocab(with_added_tokens=True)
        names = {token: name for name, token in numbers.items()}
        padding = backend.padding  # which `no_padding` removes
        backend.no_padding()
        backend.no_truncation()
        # After both are off: settings without an effect are not part of the hash.
        self.digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        # Not the number of names: numbers can have gaps.
        self.size = max(names) + 1
        self.end = next((numbers[name] for name in _ENDS if name in numbers), None)
        self.padding = next((numbers[name] for name in _PADDINGS if name in numbers), self.size)
        if padding:
            self.padding = int(padding["pad_id"])
        self._backend = backend
        self._names = names
        if max_tokens is not None:
            backend.enable_truncation(max_length=max_tokens)

    def encode(self, text: bytes) -> list[int]:
        return list(self._backend.encode(text.decode(), add_special_tokens=False).ids)

    def encode_framed(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def name(self, token: int) -> str:
        return self._names.get(token, f"token {token}")


Tokenizer = ByteTokenizer | FileTokenizer


def read_tokenizer(path: str | None, max_tokens: int | None = None) -> Tokenizer:
    """Return the tokenizer of a JSON file or of a folder of transformers; bytes for None.

    Args:
        path: file or folder.
        max_tokens: maximum length of framed texts.

    Raises:
        DataError: the file or folder is missing or damaged.
        RecipeError: the library is not installed.
    """
    if path is None:
        return ByteTokenizer(max_tokens)
    is_folder = Path(path).is_dir()
    name = "transformers" if is_folder else "tokenizers"
    library = import_optional(name, f"tokenizer {path}")
    try:
        if is_folder:
            # Nothing is downloaded, and no code of the folder runs.
            options = {"local_files_only": True, "trust_remote_code": False}
            backend = library.AutoTokenizer.from_pretrained(path, **options).backend_tokenizer
        else:
            backend = library.Tokenizer.from_file(path)
    except Exception as error:  # the libraries raise plain exceptions
        raise DataError(
            f"no tokenizer can be read from {path}: {next(iter(str(error).splitlines()), '')}",
            expected="a JSON file of the tokenizers library, or a folder with tokenizer.json; null "
            "for bytes",
            fix="correct data.options.tokenizer; tokenizers are not downloaded",
            code="E_UNREADABLE",
        ) from error
    return FileTokenizer(backend, max_tokens)


def tokens_of(text: bytes, place: str | Path, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text at `place`.

    Raises:
        DataError: the text is not UTF-8, and the tokens are not bytes.
    """
    try:
        return tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not text: {error.reason} at byte {error.start}",
            expected="UTF-8, with a tokenizer from a file",
            fix="convert or remove the text, or use bytes: data.options.tokenizer: null",
            code="E_UNREADABLE",
        ) from error


def as_tokens(tokens: list[int], place: str | Path) -> torch.Tensor:
    """Return the tokens of a text at `place` as a tensor.

    Raises:
        DataError: there are none, because the text is empty or the tokenizer drops all of its
            characters.
    """
    if not tokens:
        problem = f"{place}: the tokenizer gives no tokens for the text"
        expected = "a text with characters of the tokenizer"
        raise unusable(problem, expected, "choose another text", "E_UNREADABLE")
    return torch.tensor(tokens, dtype=torch.long)
