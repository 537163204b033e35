"""Tokens in sample files, in a stream, for next-token prediction."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from samestep.data.stream_formats import TokenFiles
from samestep.data.streams import DEFAULT_WINDOW, StreamDataset
from samestep.errors import DataError
from samestep.zoo.options import is_count, require_count, require_option
from samestep.zoo.splits import Splits, Task
from samestep.zoo.streams import ConvertedSource
from samestep.zoo.text.language import count_tokens, language_task
from samestep.zoo.text.sentences import Sample
from samestep.zoo.text.tokenizer import read_tokenizer


def load_stream_tokens(
    path: str,
    *,
    evaluation_path: str,
    block_size: int = 64,
    dtype: Literal["uint16", "uint32"] = "uint16",
    header: Literal["none", "llm.c"] = "none",
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    window: int = DEFAULT_WINDOW,
) -> Splits:
    """Return the blocks of token files, with the options of `docs/guides/streams.md`.

    The number of classes is `vocabulary`, or that of the tokenizer.

    Raises:
        InputError: the files cannot be read, or an option is invalid.
    """
    require_count("window", window, 1, DEFAULT_WINDOW)
    is_size = vocabulary is None or is_count(vocabulary, 2)
    require_option(
        "vocabulary", vocabulary, is_size, "a number of tokens, at least 2, or null", 50257
    )
    if vocabulary is None:
        encoder = read_tokenizer(tokenizer)
        names = tuple(encoder.name(token) for token in range(encoder.size))
    else:
        is_alone = tokenizer is None
        require_option(
            "tokenizer",
            tokenizer,
            is_alone,
            "null with vocabulary, as it has a size of its own",
            "null",
        )
        names = tuple(map(str, range(vocabulary)))
    convert = partial(_convert, size=len(names))
    train = ConvertedSource(TokenFiles(path, block_size, dtype, header), convert)
    evaluation = ConvertedSource(TokenFiles(evaluation_path, block_size, dtype, header), convert)
    return Splits(
        train=StreamDataset(train, window=window),
        evaluation=StreamDataset(evaluation),
        classes=names,
        reads_files=True,
        count_tokens=count_tokens,
    )


def stream_tokens_task(
    classes: tuple[str, ...],
    *,
    tokenizer: str | None = None,
    vocabulary: int | None = None,
    block_size: int = 64,
) -> Task:
    """Return the task that continues a prompt, and predicts the token after a file.

    Raises:
        DataError: the recipe has a vocabulary and no tokenizer.
    """
    require_option(
        "vocabulary", vocabulary, vocabulary is None, "null: predictions need the tokenizer", "null"
    )
    return language_task(classes, tokenizer=tokenizer, block_size=block_size)


def _convert(tokens: torch.Tensor, place: str, *, size: int) -> Sample:
    """Return the inputs and the next token of each."""
    if (largest := int(tokens.max())) >= size:
        raise DataError(
            f"{place} has the token {largest}",
            expected=f"tokens below {size}, the size of the vocabulary",
            fix="set data.options.tokenizer or vocabulary, or correct data.options.dtype and header",
            code="E_VALUE",
        )
    return tokens[:-1], tokens[1:]
