"""From text to numbers of tokens and back, by files that lie on this machine or by bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from samestep.errors import DataError
from samestep.runtime.vision import make_torchvision_importable

if TYPE_CHECKING:
    import tokenizers

_BYTES = 256
# What well-known tokenizers call the token that ends a text, and the one that fills up; the first that is there.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PADDINGS = ("[PAD]", "<pad>", "<|pad|>")


class Tokenizer(Protocol):
    """Cuts text into tokens.

    Attributes:
        size: token numbers are below it.
        end: the token that stands after each text of many, if there is one.
        padding: the token that fills up shorter texts; may be `size` itself where the tokenizer has none.
        digest: equal for tokenizers that do the same.
    """

    size: int
    end: int | None
    padding: int
    digest: str

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text (UTF-8) alone, however long.

        Raises:
            UnicodeDecodeError: it is not text.
        """

    def framed(self, text: str) -> list[int]:
        """The tokens of a text as a classifier reads it: cut to the longest, between what marks its ends."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without those that mark its ends."""

    def name(self, token: int) -> str:
        """What a token is called."""


class Bytes:
    """Every byte of UTF-8 is a token, and one more ends a text. Needs no file, knows every language, and is long.

    Args:
        most: tokens of a framed text.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.size, self.padding, self.digest = _BYTES + 1, _BYTES + 1, "bytes"
        self.end: int | None = _BYTES

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def framed(self, text: str) -> list[int]:
        # A classifier looks at the first place, so something has to stand there that is no part of the text.
        inner = text.encode() if self._most is None else text.encode()[: self._most - 2]
        return [_BYTES, *inner, _BYTES]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")

    def name(self, token: int) -> str:
        if token == _BYTES:
            return "end"
        return chr(token) if 0x20 < token < 0x7F else f"0x{token:02x}"


class FileTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        backend: it; what it cuts and fills up by itself is set anew.
        most: tokens of a framed text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, most: int | None = None) -> None:
        names = {token: name for name, token in backend.get_vocab(with_added_tokens=True).items()}
        known = {name: token for token, name in names.items()}
        filled = backend.padding
        backend.no_padding()
        backend.no_truncation()
        self.digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.size = max(names) + 1
        self.end = next((known[name] for name in _ENDS if name in known), None)
        usual = next((known[name] for name in _PADDINGS if name in known), self.size)
        self.padding = int(filled["pad_id"]) if filled else usual
        self._backend, self._names = backend, names
        if most is not None:
            backend.enable_truncation(max_length=most)

    def encode(self, text: bytes) -> list[int]:
        return list(self._backend.encode(text.decode(), add_special_tokens=False).ids)

    def framed(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def name(self, token: int) -> str:
        return self._names.get(token, f"token {token}")


def read_tokenizer(path: str | None, most: int | None = None) -> Tokenizer:
    """Bytes, or the tokenizer of a JSON file of the `tokenizers` library or of a folder that transformers wrote.

    Args:
        most: tokens of a framed text.

    Raises:
        DataError: there is none, or what reads it is not installed.
    """
    if path is None:
        return Bytes(most)
    try:
        backend = _from_folder(Path(path)) if Path(path).is_dir() else _from_file(Path(path))
    except ImportError as error:
        raise DataError(
            f"{path} cannot be read: {error}", rule="tokenizers are read by libraries", do="pip install 'samestep[zoo]'"
        ) from error
    return FileTokenizer(backend, most)


def _from_file(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if not path.is_file():
        raise _unreadable(path, "there is no such file or folder")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more particular
        raise _unreadable(path, str(error)) from error


def _from_folder(path: Path) -> tokenizers.Tokenizer:
    make_torchvision_importable()
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, str(error).splitlines()[0]) from error
    if not found.is_fast:
        raise _unreadable(path, f"{type(found).__name__} is written in Python")
    backend: tokenizers.Tokenizer = found.backend_tokenizer
    return backend


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        f"no tokenizer can be read from {path}: {why}",
        rule="a JSON file of the tokenizers library, or a folder with tokenizer.json; null for bytes",
        do="look at data.options.tokenizer; nothing is downloaded",
    )
