"""Patterns choose names in their own order, and what matches nothing is told with names that are near."""

import pytest

from samestep.config.patterns import chosen
from samestep.errors import InputError

NAMES = ["stem.weight", "blocks.0.weight", "blocks.1.weight", "head.bias"]


def test_names_come_in_their_own_order_and_once() -> None:
    found = chosen(NAMES, ["head.*", "blocks.?.weight", "*.bias"], key="model.freeze", what="parameter", example="a.*")
    assert found == ["blocks.0.weight", "blocks.1.weight", "head.bias"]


def test_a_pattern_of_nothing_is_refused_with_names_that_are_near() -> None:
    with pytest.raises(InputError, match=r"model.freeze: 'block.0.weight' matches no parameter") as caught:
        chosen(NAMES, ["head.*", "block.0.weight"], key="model.freeze", what="parameter", example="layer1.*")
    assert "blocks.0.weight" in str(caught.value)


def test_no_pattern_chooses_nothing() -> None:
    assert chosen(NAMES, [], key="model.freeze", what="parameter", example="a.*") == []
