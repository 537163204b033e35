"""Generated English sentences, character by character, and a small transformer that predicts the next character.

The sentences are generated with integer arithmetic alone and are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from samestep.zoo.options import require_option
from samestep.zoo.splits import Splits
from samestep.zoo.text.models import causal_attention, require_divisible

PADDING = -100  # target that `samestep.cross_entropy` ignores
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

Sample = tuple[torch.Tensor, torch.Tensor]


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
    """Return inputs and targets padded to the longest sample; targets are padded with `PADDING`."""
    inputs, targets = (list(column) for column in zip(*samples, strict=True))
    return pad_sequence(inputs, batch_first=True), pad_sequence(
        targets, batch_first=True, padding_value=PADDING
    )


class TokensNet(nn.Module):
    """Causal transformer with position embeddings.

    Args:
        num_classes: vocabulary size.
        width: embedding size.
        heads: attention heads per block; `width` is a multiple of it.
        blocks: number of blocks.
        dropout: dropout probability of the residual branches.
        longest: maximum number of tokens of a line.
    """

    def __init__(
        self,
        num_classes: int = len(ALPHABET),
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        dropout: float = 0.1,
        longest: int = 128,
    ) -> None:
        super().__init__()
        require_divisible(width, heads)
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes, T)` of the next token for each of `tokens` `(N, T)`.

        Padding at the end of a line needs no mask: attention is causal.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(
            self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        )
        return logits.transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.layers_norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        attended = self.joined(
            causal_attention(self.mixed(self.attention_norm(features)), self.heads)
        )
        features = features + self.dropout(attended)
        residual: torch.Tensor = self.dropout(self.layers(self.layers_norm(features)))
        return features + residual


def _random_numbers() -> Iterator[int]:
    """Yield the upper half of each state of Knuth's 64-bit linear congruential generator MMIX."""
    state = 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state >> 32


def _sentence(numbers: Iterator[int]) -> str:
    is_plural = next(numbers) % 2 == 1
    verb = _pick(_VERBS, numbers) + ("" if is_plural else "s")
    words = [*_noun_phrase(numbers, is_plural=is_plural), verb]
    words += _noun_phrase(numbers, is_plural=next(numbers) % 2 == 1)
    words += [_pick(_PLACES, numbers)] if next(numbers) % 2 else []
    words += [_pick(_TIMES, numbers)] if next(numbers) % 3 == 0 else []
    return " ".join(words) + "."


def _noun_phrase(numbers: Iterator[int], *, is_plural: bool) -> list[str]:
    noun = _pick(_NOUNS, numbers)
    adjectives = [_pick(_ADJECTIVES, numbers)] if next(numbers) % 2 else []
    noun_form = _PLURALS.get(noun, f"{noun}s") if is_plural else noun
    return [_pick(_DETERMINERS[is_plural], numbers), *adjectives, noun_form]


def _pick(words: tuple[str, ...], numbers: Iterator[int]) -> str:
    return words[next(numbers) % len(words)]
