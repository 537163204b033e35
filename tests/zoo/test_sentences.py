"""Generated sentences and the model `tokens_net`."""

import hashlib
import re
from typing import Any

import pytest
import torch

from samestep.errors import RecipeError
from samestep.zoo.language_models import TokensNet
from samestep.zoo.options import call
from samestep.zoo.sentences import ALPHABET, collate_padded, encode_lines, load_tokens, make_lines


def texts(lines: list[Any]) -> list[str]:
    """Return the lines as text: the inputs and the last target."""
    return ["".join(ALPHABET[token] for token in [*inputs, targets[-1]]) for inputs, targets in lines]


def test_lines_are_equal_on_every_machine() -> None:
    digest = hashlib.sha256("\n".join(make_lines(1000)).encode()).hexdigest()
    assert digest == "17a58796139b9de7633b60c8eb979cd288a48ac244ba26fad31edd07ac680ebc"


def test_lines_are_different_and_of_many_lengths() -> None:
    lines = make_lines(1000)
    assert len(set(lines)) == 1000
    assert (min(map(len, lines)), max(map(len, lines))) == (21, 71)
    assert all(re.fullmatch(r"[a-z]+( [a-z]+){4,12}\.", line) for line in lines)


def test_every_fifth_line_is_for_validation() -> None:
    splits = load_tokens(lines=100)
    assert (len(splits.train), len(splits.evaluation), "".join(splits.classes)) == (80, 20, ALPHABET)
    assert isinstance(splits.train, list)
    assert isinstance(splits.evaluation, list)
    train, validation = texts(splits.train), texts(splits.evaluation)
    assert sorted([*train, *validation]) == sorted(f"\n{line}\n" for line in make_lines(100))
    assert validation[1] == f"\n{make_lines(6)[5]}\n"


def test_padding_targets_are_ignored() -> None:
    inputs, targets = collate_padded(encode_lines(["ab", "abcd"]))
    a, b, c, d = (ALPHABET.index(letter) for letter in "abcd")
    assert inputs.tolist() == [[0, a, b, 0, 0], [0, a, b, c, d]]
    assert targets.tolist() == [[a, b, 0, -100, -100], [a, b, c, d, 0]]


def net(**options: float) -> TokensNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TokensNet(width=16, heads=2, **options)  # type: ignore[arg-type]


def test_attention_is_causal() -> None:
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


@pytest.mark.parametrize("options", [{"heads": 7}, {"heads": 0}, {"dropout": "x"}])
def test_options_with_which_no_model_can_be_built_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        call(TokensNet, options, where="model.options")
    assert caught.value.code == "E_VALUE"
