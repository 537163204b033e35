"""The lines of text are always the same ones, and what stands for padding counts nowhere."""

import hashlib
import re

import pytest
import torch

from samestep.errors import DataError
from samestep.recipes.text.tokens import ALPHABET, Lines, TokensNet, load_tokens, make_lines, padded


def texts(lines: Lines) -> list[str]:
    """The lines behind the tokens, each as what is read and what comes last."""
    pairs = [lines[index] for index in range(len(lines))]
    return ["".join(ALPHABET[token] for token in [*inputs, targets[-1]]) for inputs, targets in pairs]


def test_lines_are_the_same_ones_everywhere() -> None:
    digest = hashlib.sha256("\n".join(make_lines(1000)).encode()).hexdigest()
    assert digest == "17a58796139b9de7633b60c8eb979cd288a48ac244ba26fad31edd07ac680ebc"


def test_lines_differ_and_are_of_many_lengths() -> None:
    lines = make_lines(1000)
    assert len(set(lines)) == 1000
    assert (min(map(len, lines)), max(map(len, lines))) == (21, 71)
    assert all(re.fullmatch(r"[a-z]+( [a-z]+){4,12}\.", line) for line in lines)


def test_fewer_lines_are_the_first_of_more() -> None:
    assert make_lines(10) == make_lines(1000)[:10]


def test_every_fifth_line_is_kept_apart() -> None:
    splits = load_tokens(lines=100)
    assert (len(splits.train), len(splits.evaluation), "".join(splits.classes)) == (80, 20, ALPHABET)
    assert isinstance(splits.train, Lines)
    assert isinstance(splits.evaluation, Lines)
    trained, evaluated = texts(splits.train), texts(splits.evaluation)
    assert sorted([*trained, *evaluated]) == sorted(f"\n{line}\n" for line in make_lines(100))
    assert evaluated[1] == f"\n{make_lines(6)[5]}\n"


@pytest.mark.parametrize("lines", [0, 9, 10_001])
def test_lines_that_cannot_be_made_are_refused(lines: int) -> None:
    with pytest.raises(DataError, match=rf"data\.options\.lines is {lines}"):
        load_tokens(lines=lines)


def test_as_many_lines_as_are_allowed_can_be_made() -> None:
    assert len(load_tokens(lines=10_000).train) == 8_000


def test_shorter_lines_are_filled_up_with_what_does_not_count() -> None:
    lines = Lines(["ab", "abcd"])
    inputs, targets = padded([lines[0], lines[1]])
    a, b, c, d = (ALPHABET.index(letter) for letter in "abcd")
    assert inputs.tolist() == [[0, a, b, 0, 0], [0, a, b, c, d]]
    assert targets.tolist() == [[a, b, 0, -100, -100], [a, b, c, d, 0]]


def net(**options: float) -> TokensNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TokensNet(width=16, heads=2, **options)  # type: ignore[arg-type]


def test_no_place_looks_ahead_so_padding_changes_nothing() -> None:
    model = net().eval()
    tokens = torch.randint(0, len(ALPHABET), (2, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 6:] = 0
    with torch.no_grad():
        logits, others, cut = model(tokens), model(changed), model(tokens[:, :6])
    assert logits.shape == (2, len(ALPHABET), 9)
    assert torch.equal(logits[..., :6], others[..., :6])
    assert not torch.equal(logits[..., 6:], others[..., 6:])
    torch.testing.assert_close(logits[..., :6], cut)


def test_dropout_is_at_work_in_training() -> None:
    model, tokens = net(dropout=0.5), torch.zeros(1, 4, dtype=torch.int64)
    with torch.random.fork_rng():
        assert not torch.equal(model(tokens), model(tokens))
