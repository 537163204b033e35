"""Text files as one row of tokens, cut into blocks, for a model that guesses the next token."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from samestep.errors import DataError
from samestep.recipes.splits import Splits
from samestep.recipes.task import Task
from samestep.recipes.text.generation import complete, next_tokens
from samestep.recipes.text.packed import Document, Tokens, packed_tokens, read_document
from samestep.recipes.text.tokenizer import Tokenizer, read_tokenizer
from samestep.recipes.text.tokens import PADDING, Sample, padded

_CACHE = ".samestep-cache"
# Below Python's own library: what others installed, and tests.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class Blocks:
    """So many tokens each, and for each of them the one that comes next; the last block holds what is left.

    Every token but the first is a target exactly once.

    Attributes:
        tokens: all of them, in a row.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.tokens, self._context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1 + self._context - 1) // self._context

    def __getitem__(self, index: int) -> Sample:
        start = index * self._context
        block = torch.from_numpy(self.tokens[start : start + self._context + 1].astype("int64"))
        return block[:-1], block[1:]


def load_language(
    path: str | None = None,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.1,
    split: str = "auto",
    suffixes: Sequence[str] = (".txt",),
    tokenizer: str | None = None,
    context: int = 64,
    train_tokens: int | None = None,
    evaluation_tokens: int | None = None,
    cache: str = _CACHE,
) -> Splits:
    """Text files, or the source of Python's standard library where no path is given.

    Args:
        path: a file, or a folder of files, in the order of a hash of their names, so that a part of them is mixed.
        evaluation_path: other text to evaluate on; else a part of `path` is kept apart.
        evaluation_fraction: how much is kept apart.
        split: `files` keeps whole files apart, by that hash; `tail` the end of the row; `auto` is `tail` for one file.
        suffixes: of the files of a folder.
        tokenizer: a `tokenizers` JSON file or a folder that transformers wrote; null for bytes.
        context: tokens of a block.
        train_tokens: predict only the first so many.
        evaluation_tokens: evaluate only the first so many.
        cache: a folder for the packed tokens.

    Raises:
        DataError: there is no text, or too little.
    """
    _require(0 < evaluation_fraction < 1, f"evaluation_fraction is {evaluation_fraction}", "between 0 and 1", 0.1)
    _require(split in ("auto", "files", "tail"), f"split is {split!r}", "auto, files or tail", "auto")
    _require(context >= 1, f"context is {context}", "context >= 1", 64)
    found = read_tokenizer(tokenizer)
    documents = _library() if path is None else _documents(Path(path), suffixes)
    pack = partial(packed_tokens, tokenizer=found, folder=Path(cache))
    kept_apart: Sequence[Document] = ()
    if evaluation_path is not None:
        kept_apart = _documents(Path(evaluation_path), suffixes)
        train, evaluation = pack(documents), pack(kept_apart)
    elif split == "tail" or (split == "auto" and len(documents) == 1):
        row = pack(documents)
        cut = len(row) - round(len(row) * evaluation_fraction)
        train, evaluation = row[:cut], row[cut:]
    else:
        documents, kept_apart = _split(documents, evaluation_fraction)
        train, evaluation = pack(documents), pack(kept_apart)
    parts = {
        "train": _part(train, train_tokens, "train"),
        "evaluation": _part(evaluation, evaluation_tokens, "evaluation"),
    }
    return Splits(
        train=Blocks(parts["train"], context),
        evaluation=Blocks(parts["evaluation"], context),
        classes=tuple(found.name(token) for token in range(found.size)),
        collate=padded,
        count_tokens=_count_tokens,
        notes=(_note(path, [*documents, *kept_apart], {name: len(part) - 1 for name, part in parts.items()}),),
    )


def _count_tokens(shard: Sample) -> tuple[int, int]:
    targets = shard[1]
    return int((targets != PADDING).sum()), targets.numel()


def language_task(classes: tuple[str, ...], *, tokenizer: str | None = None, context: int = 64, **others: Any) -> Task:
    """Goes on with a text; of a file it tells which tokens may come next."""
    found = read_tokenizer(tokenizer)
    return Task(
        reads="a text file",
        read=partial(_beginning, found, context),
        tell=partial(next_tokens, found),
        complete=partial(complete, tokenizer=found, context=context),
    )


def _beginning(tokenizer: Tokenizer, context: int, path: Path) -> torch.Tensor:
    tokens = tokenizer.encode(path.read_bytes())[-context:]
    if not tokens:
        raise DataError(f"{path} is empty", rule="text to go on from", do="write something")
    return torch.tensor(tokens)


def _library() -> list[Document]:
    """The source of this Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    return _in_order(root, files)


def _documents(path: Path, suffixes: Sequence[str]) -> list[Document]:
    if path.is_file():
        return [read_document(path, path.name)]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}", rule="text to train on", do="look at data.options.path")
    files = [file for file in path.rglob("*") if file.suffix in suffixes and file.is_file()]
    if not files:
        raise DataError(
            f"{path} has no files that end in {', '.join(suffixes)}",
            rule="text to train on",
            do="--set data.options.suffixes='[.md, .txt]'",
        )
    return _in_order(path, files)


def _in_order(root: Path, files: Sequence[Path]) -> list[Document]:
    found = [read_document(file, file.relative_to(root).as_posix()) for file in files]
    return sorted(found, key=lambda document: (_place(document), document.name))


def _place(document: Document) -> float:
    """A number in 0..1 that only the file's name decides, so that files added later move no other."""
    return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:6]) / 2**48


def _split(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Keep the files apart whose names hash to less than `fraction`, and at least one on each side."""
    _require(
        len(documents) > 1, "there is one file and split is files", "one to train on and one to evaluate on", "tail"
    )
    apart = sum(_place(document) < fraction for document in documents)
    apart = min(len(documents) - 1, max(1, apart))
    return list(documents[apart:]), list(documents[:apart])


def _part(tokens: Tokens, most: int | None, name: str) -> Tokens:
    """The first tokens, of which the very first is not predicted."""
    part = tokens if most is None else tokens[: most + 1]
    _require(
        len(part) > 1,
        f"{name} has {len(part)} tokens (limit {most})",
        "at least two tokens, one to read and one to guess",
        "give more text",
    )
    return part


def _note(path: str | None, documents: Sequence[Document], tokens: dict[str, int]) -> str:
    where = f"source of Python {platform.python_version()}'s library" if path is None else path
    digest = hashlib.sha256("".join(sorted(document.digest for document in documents)).encode()).hexdigest()[:16]
    size = sum(document.size for document in documents)
    guessed = ", ".join(f"{number:,} {name}" for name, number in tokens.items())
    return f"text: {where}: {len(documents)} files, {size:,} bytes, hash {digest}; tokens to guess: {guessed}"


def _require(holds: bool, value: str, rule: str, do: object) -> None:
    if not holds:
        raise DataError(f"data.options: {value}", rule=rule, do=str(do))
