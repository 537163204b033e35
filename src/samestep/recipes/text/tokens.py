"""Lines of a small made-up English, letter by letter, and a small transformer that guesses the next letter.

The lines are made by whole-number arithmetic alone, so they are the same wherever and whenever they are made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from samestep.errors import DataError
from samestep.recipes.splits import Splits

PADDING = -100  # as a target; `samestep.cross_entropy` neither adds nor counts it
ALPHABET = "\n .abcdefghijklmnopqrstuvwxyz"  # a line begins and ends with the first of them
_MOST_LINES = 10_000

# One and many, so that what a line says at its end depends on its beginning.
_COUNTS = (("the", "that", "one", "this", "no"), ("the", "two", "some", "these", "many"))
_KINDS = ("old", "small", "red", "quiet", "hungry", "clever", "young", "grey")
_NOUNS = ("fox", "cat", "dog", "bird", "horse", "child", "king", "farmer", "owl", "mouse")
_MANY = {"fox": "foxes", "child": "children", "mouse": "mice"}
_VERBS = ("see", "follow", "hear", "like", "help", "paint")
_PLACES = ("under the tree", "in the garden", "near the river", "behind the house", "on the hill")
_TIMES = ("today", "at night", "in spring", "every morning")

Sample = tuple[torch.Tensor, torch.Tensor]


class Lines:
    """Lines as pairs of token numbers: what is read, and for each of them the one that comes next."""

    def __init__(self, lines: list[str]) -> None:
        numbers = {letter: number for number, letter in enumerate(ALPHABET)}
        self._tokens = [torch.tensor([numbers[letter] for letter in f"\n{line}\n"]) for line in lines]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Sample:
        tokens = self._tokens[index]
        return tokens[:-1], tokens[1:]


def load_tokens(*, lines: int = 1000) -> Splits:
    """So many different lines, of which every fifth is kept apart to evaluate on.

    Raises:
        DataError: there cannot be as many.
    """
    if not 10 <= lines <= _MOST_LINES:
        raise DataError(
            f"data.options.lines is {lines}", rule=f"10 <= lines <= {_MOST_LINES}", do="--set data.options.lines=1000"
        )
    made = make_lines(lines)
    return Splits(
        train=Lines([line for number, line in enumerate(made) if number % 5]),
        evaluation=Lines(made[::5]),
        classes=tuple(ALPHABET),
        collate=padded,
    )


def make_lines(count: int) -> list[str]:
    """The first `count` different lines."""
    numbers, lines = _numbers(), dict[str, None]()
    while len(lines) < count:
        lines[_sentence(numbers)] = None
    return list(lines)


def padded(samples: list[Sample]) -> Sample:
    """Samples side by side, as long as the longest; targets of what was added are `PADDING`."""
    inputs, targets = (list(column) for column in zip(*samples, strict=True))
    return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=PADDING)


class TokensNet(nn.Module):
    """A causal transformer: token and position embeddings, blocks of attention and two layers, a linear layer.

    Args:
        num_classes: number of different tokens.
        width: features of a token.
        heads: of each attention; they share the width.
        blocks: how many.
        dropout: probability, of what each block adds.
        longest: tokens of the longest line.
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
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(N, num_classes, T)` of the token after each of `(N, T)`.

        Padding stands at the end of a line, where no earlier place looks, so it needs no mask.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.blocks(self.tokens(tokens) + self.positions(places))
        logits: torch.Tensor = self.head(self.norm(features))
        return logits.transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.layers_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features + self.dropout(self._attend(self.attention_norm(features)))
        added: torch.Tensor = self.dropout(self.layers(self.layers_norm(features)))
        return features + added

    def _attend(self, features: torch.Tensor) -> torch.Tensor:
        # Written out: the fused kernels for this have no deterministic backward on every device.
        lines, length, width = features.shape
        shape = (lines, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.mixed(features).chunk(3, dim=2))
        scores = query @ key.transpose(2, 3) / shape[3] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=features.device).triu(1)
        attention = functional.softmax(scores.masked_fill(later, float("-inf")), dim=3)
        joined: torch.Tensor = self.joined((attention @ value).transpose(1, 2).reshape(features.shape))
        return joined


def _numbers() -> Iterator[int]:
    """Knuth's linear congruential generator MMIX of 64 bits, the upper half of each state."""
    state = 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        yield state >> 32


def _sentence(numbers: Iterator[int]) -> str:
    is_many = next(numbers) % 2 == 1
    verb = _pick(_VERBS, numbers) + ("" if is_many else "s")
    words = [*_things(numbers, is_many=is_many), verb, *_things(numbers, is_many=next(numbers) % 2 == 1)]
    words += [_pick(_PLACES, numbers)] if next(numbers) % 2 else []
    words += [_pick(_TIMES, numbers)] if next(numbers) % 3 == 0 else []
    return " ".join(words) + "."


def _things(numbers: Iterator[int], *, is_many: bool) -> list[str]:
    noun = _pick(_NOUNS, numbers)
    kinds = [_pick(_KINDS, numbers)] if next(numbers) % 2 else []
    return [_pick(_COUNTS[is_many], numbers), *kinds, _MANY.get(noun, f"{noun}s") if is_many else noun]


def _pick(words: tuple[str, ...], numbers: Iterator[int]) -> str:
    return words[next(numbers) % len(words)]
