"""Generated English sentences, character by character.

The sentences are generated with integer arithmetic alone and are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from samestep.zoo.losses import IGNORED
from samestep.zoo.options import require_option
from samestep.zoo.splits import Splits

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
    """Return inputs and targets padded to the longest sample; targets are padded with `IGNORED`."""
    inputs = pad_sequence([sample[0] for sample in samples], batch_first=True)
    targets = [sample[1] for sample in samples]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=IGNORED)


def _random_numbers() -> Iterator[int]:
    """Yield the upper half of each state of Knuth's 64-bit linear congruential generator MMIX."""
    state = 1
    while True:
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
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
