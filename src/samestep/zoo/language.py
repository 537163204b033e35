"""Text for next-token prediction: text files, and generated sentences.

The tokens of text files are in a memory-mapped file of a cache, named by a hash of tokenizer and
texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from samestep.checkpoint.durable_files import replacing
from samestep.config.validation import require_path
from samestep.errors import DataError
from samestep.zoo.data_files import files_below, fingerprint_of
from samestep.zoo.losses import IGNORED
from samestep.zoo.options import is_count, require_count, require_option
from samestep.zoo.splits import (
    Answer,
    Splits,
    Task,
    most_probable,
)
from samestep.zoo.tokenizers import Tokenizer, as_tokens, read_tokenizer, tokens_of
from samestep.zoo.validation_split import (
    hash_fraction,
    require_fraction,
    train_validation_split,
)

# Folders of the standard library that contain installed packages or tests.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
CACHE = ".samestep-cache"
# Of generated text.
_TEMPERATURE = 0.8
_TOP_K = 50
_CACHE_FORMAT = 1  # part of the file name; a change makes existing files unused
Tokens = NDArray[Any]
Sample = tuple[torch.Tensor, torch.Tensor]

# Of generated sentences.
ALPHABET = "\n .abcdefghijklmnopqrstuvwxyz"  # the first character marks start and end of a line
_MAX_LINES = 10_000

# Singular and plural, so that the end of a sentence depends on its beginning.
_DETERMINERS = (("the", "that", "one", "this", "no"), ("the", "two", "some", "these", "many"))
_ADJECTIVES = ("old", "small", "red", "quiet", "hungry", "clever", "young", "grey")
_NOUNS = ("fox", "cat", "dog", "bird", "horse", "child", "king", "farmer", "owl", "mouse")
_PLURALS = {"fox": "foxes", "child": "children", "mouse": "mice"}
_VERBS = ("see", "follow", "hear", "like", "help", "paint")
_PLACES = ("under the tree", "in the garden", "near the river", "behind the house", "on the hill")
_TIMES = ("today", "at night", "in spring", "every morning")


class Blocks:
    """Blocks of tokens with the next token of each; the last block may be shorter.

    Every token but the first is a target exactly once.

    Attributes:
        tokens: all tokens.
    """

    def __init__(self, tokens: Tokens, block_size: int) -> None:
        self.tokens = tokens
        self._block_size = block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1 + self._block_size - 1) // self._block_size

    def __getitem__(self, index: int) -> Sample:
        start = index * self._block_size
        # A copy: the map cannot be written, and embeddings take int64.
        block = torch.from_numpy(self.tokens[start : start + self._block_size + 1].astype("int64"))
        return block[:-1], block[1:]


def load_language(
    path: str | None = None,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.1,
    suffixes: Sequence[str] = (".txt",),
    tokenizer: str | None = None,
    block_size: int = 64,
    train_tokens: int | None = None,
    evaluation_tokens: int | None = None,
    cache: str = CACHE,
) -> Splits:
    """Return the blocks of text files, with the options of `docs/guides/text.md`.

    If `path` is None, the text is the source of Python's standard library.

    Raises:
        DataError: there is not enough text, or an option is invalid.
    """
    require_fraction(evaluation_fraction)
    require_count("block_size", block_size, 1, 64)
    is_list = not isinstance(suffixes, str)
    require_option("suffixes", suffixes, is_list, "a list of suffixes", "[.md]")
    encoder = read_tokenizer(tokenizer)
    documents = _documents(path, suffixes)
    validation_documents: list[Document] = []
    if evaluation_path is not None:
        validation_documents = _documents(evaluation_path, suffixes)
    elif len(documents) > 1:
        names = [document.name for document in documents]
        parts = train_validation_split(names, evaluation_fraction, unit="file")
        every = documents
        documents, validation_documents = ([every[at] for at in indices] for indices in parts)
    train = cached_tokens(documents, encoder, Path(cache))
    if validation_documents:
        validation = cached_tokens(validation_documents, encoder, Path(cache))
    else:
        bound = len(train) - round(len(train) * evaluation_fraction)
        train, validation = train[:bound], train[bound:]
    train = _first(train, train_tokens, "train_tokens")
    validation = _first(validation, evaluation_tokens, "evaluation_tokens")
    return Splits(
        train=Blocks(train, block_size),
        evaluation=Blocks(validation, block_size),
        classes=tuple(encoder.name(token) for token in range(encoder.size)),
        collate=collate_padded,
        fingerprint=fingerprint_of(
            [file.name for file in documents], checksums=[file.digest for file in documents]
        ),
    )


def language_task(
    classes: tuple[str, ...], *, tokenizer: str | None = None, block_size: int = 64
) -> Task:
    """Return the task that continues a prompt, and predicts the token after a file."""
    encoder = read_tokenizer(tokenizer)

    def read(path: Path) -> torch.Tensor:
        # The end of the text: the answer is the token after the text.
        return as_tokens(tokens_of(path.read_bytes(), path, encoder)[-block_size:], path)

    return Task(
        reads="a text file",
        read=read,
        describe=partial(next_tokens, encoder),
        complete=partial(complete, tokenizer=encoder, block_size=block_size),
    )


def _documents(source: str | None, suffixes: Sequence[str]) -> list[Document]:
    """Return documents in the order of a hash of their names.

    Files that are added later do not change the order of the others.
    """
    root = Path(sysconfig.get_path("stdlib"))
    if source is not None:
        root = Path(source)
    if root.is_file():
        return [read_document(root, root.name)]
    if source is None:
        sources = root.rglob("*.py")
        files = [file for file in sources if _NOT_LIBRARY.isdisjoint(file.relative_to(root).parts)]
    else:
        require_path(root, "folder", "data.options.path is a file or folder of text")
        files = files_below(root, suffixes)
    if not files:
        raise DataError(
            f"{root} has no files that end in {', '.join(suffixes)}",
            expected="text files",
            fix="data.options.suffixes='[.md, .txt]'",
            code="E_FILE_MISSING",
        )
    documents = [read_document(file, file.relative_to(root).as_posix()) for file in files]
    return sorted(documents, key=lambda document: (hash_fraction(document.name), document.name))


def _first(tokens: Tokens, limit: int | None, option: str) -> Tokens:
    """Return the first tokens with `limit` targets; the first token is not a target."""
    first = tokens if limit is None else tokens[: limit + 1]
    is_valid = (limit is None or is_count(limit)) and len(first) >= 2
    expected = f"null or at least 1, of {len(tokens)} tokens; at least two"
    require_option(option, limit, is_valid, expected, "null")
    return first


def complete(
    model: torch.nn.Module, prompt: str, count: int, *, tokenizer: Tokenizer, block_size: int
) -> str:
    """Return at most `count` tokens after `prompt` as text, without the prompt."""
    # Bytes of the command line that are not UTF-8 are surrogates.
    start = tokens_of(prompt.encode(errors="surrogateescape"), "the prompt", tokenizer)
    if not start:
        start = [tokenizer.end or 0]  # the end token precedes every document
    return tokenizer.decode(generate(model, start, count, block_size=block_size, end=tokenizer.end))


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokens: list[int],
    count: int,
    *,
    block_size: int,
    end: int | None = None,
) -> list[int]:
    """Return at most `count` tokens that follow `tokens`.

    They are drawn from the most probable ones with a fixed seed.

    Args:
        model: function from tokens `(N, T)` to logits `(N, vocabulary, T)`.
        tokens: the beginning.
        count: maximum number of tokens.
        block_size: maximum number of tokens of the model's input.
        end: token that ends the generation.
    """
    # Of the CPU: the same numbers for every device of the model.
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    model.eval()
    result: list[int] = []
    while len(result) < count:
        window = [*tokens, *result][-block_size:]
        logits = model(torch.tensor([window], device=device))[0, :, -1].double().cpu()
        # Stable: equal logits have the order of their tokens on every device.
        values, order = logits.sort(descending=True, stable=True)
        probabilities = (values[:_TOP_K] / _TEMPERATURE).softmax(dim=0)
        token = int(order[torch.multinomial(probabilities, 1, generator=generator)])
        if token == end:
            break
        result.append(token)
    return result


def next_tokens(tokenizer: Tokenizer, outputs: torch.Tensor) -> Answer:
    """Return the five most probable tokens after outputs `(1, C, T)` or `(C, T)`."""
    pairs = most_probable(outputs.reshape(outputs.shape[-2:])[:, -1], count=5)
    top = [{"token": tokenizer.name(token), "probability": value} for token, value in pairs]
    return {"next": top}


class Document(NamedTuple):
    """Text file."""

    name: str  # path below the dataset's folder, equal on all machines
    path: Path
    digest: str  # SHA-256 of the content


def read_document(path: Path, name: str) -> Document:
    """Return a file of text with its hash."""
    return Document(name, path, hashlib.sha256(path.read_bytes()).hexdigest())


def cached_tokens(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path) -> Tokens:
    """Return the tokens of all documents in order, each followed by the end token.

    They are in a memory-mapped file, whose name is a hash of the tokenizer and of the names and
    contents of the documents. It is written under another name and renamed, so processes can write
    it at the same time without waiting: their contents are equal.

    Raises:
        DataError: a document is not text, or the tokenizer has no end token.
    """
    kind = "u2" if tokenizer.size <= 2**16 else "u4"
    dtype = numpy.dtype(f"<{kind}")  # machines can share the file
    contents = [(document.name, document.digest) for document in documents]
    # The end token too: Samestep selects one, by `_ENDS`.
    key = [_CACHE_FORMAT, tokenizer.digest, tokenizer.end, contents]
    path = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.{kind}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            for row in _encoded(documents, tokenizer):
                file.write(numpy.array(row, dtype=dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())  # before the renaming, which could reach the disk first
    if not path.stat().st_size:
        return numpy.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return numpy.memmap(path, dtype=dtype, mode="r")


def _encoded(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each document that is not empty."""
    end = tokenizer.end
    if end is None:
        raise DataError(
            "data.options.tokenizer has no end token",
            expected="a tokenizer with an end token such as <|endoftext|>, which separates "
            "documents",
            fix="add a special token",
            code="E_VALUE",
        )
    for document in documents:
        tokens = tokens_of(document.path.read_bytes(), document.path, tokenizer)
        if tokens:
            yield [*tokens, end]


def encode_lines(lines: list[str]) -> list[Sample]:
    """Return pairs of token numbers for each line: the inputs, and the next token of each."""
    numbers = {letter: number for number, letter in enumerate(ALPHABET)}
    rows = [torch.tensor([numbers[letter] for letter in f"\n{line}\n"]) for line in lines]
    return [(tokens[:-1], tokens[1:]) for tokens in rows]


def load_tokens(*, lines: int = 1000) -> Splits:
    """Return `lines` different lines; every fifth line is for validation.

    Raises:
        DataError: `lines` is out of range.
    """
    require_option("lines", lines, 10 <= lines <= _MAX_LINES, f"10 <= lines <= {_MAX_LINES}", 1000)
    texts = make_lines(lines)
    return Splits(
        train=encode_lines([line for number, line in enumerate(texts) if number % 5]),
        evaluation=encode_lines(texts[::5]),
        classes=tuple(ALPHABET),
        collate=collate_padded,
    )


def make_lines(count: int) -> list[str]:
    """Return the first `count` different lines."""
    numbers = _random_numbers()
    lines = dict[str, None]()
    while len(lines) < count:
        lines[_sentence(numbers)] = None
    return list(lines)


def collate_padded(samples: list[Sample]) -> Sample:
    """Return inputs and targets padded to the longest sample; targets are padded with `IGNORED`."""
    # Any token: causal models ignore later ones, and the targets there are not counted.
    inputs = pad_sequence([sample[0] for sample in samples], batch_first=True)
    targets = [sample[1] for sample in samples]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=IGNORED)


def _random_numbers() -> Iterator[int]:
    """Yield the upper half of each state of Knuth's 64-bit linear congruential generator MMIX."""
    # Not a generator of a library: versions of Python and torch would draw other lines.
    state = 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        # The lower bits have short periods, and most draws are remainders of small numbers.
        yield state >> 32


def _sentence(numbers: Iterator[int]) -> str:
    is_plural = next(numbers) % 2 == 1
    verb = _pick(_VERBS, numbers)
    if not is_plural:
        verb += "s"
    words = [*_noun_phrase(numbers, is_plural=is_plural), verb]
    words += _noun_phrase(numbers, is_plural=next(numbers) % 2 == 1)
    if next(numbers) % 2:
        words.append(_pick(_PLACES, numbers))
    if next(numbers) % 3 == 0:
        words.append(_pick(_TIMES, numbers))
    return " ".join(words) + "."


def _noun_phrase(numbers: Iterator[int], *, is_plural: bool) -> list[str]:
    noun = _pick(_NOUNS, numbers)
    words = [noun]
    if is_plural:
        words = [_PLURALS.get(noun, f"{noun}s")]
    if next(numbers) % 2:
        words.insert(0, _pick(_ADJECTIVES, numbers))
    return [_pick(_DETERMINERS[is_plural], numbers), *words]


def _pick(words: tuple[str, ...], numbers: Iterator[int]) -> str:
    return words[next(numbers) % len(words)]
