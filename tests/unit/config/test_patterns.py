"""Selection of names by shell patterns."""

import pytest

from samestep.config.validation import match_patterns
from samestep.errors import InputError

NAMES = ["stem.weight", "blocks.0.weight", "blocks.1.weight", "head.bias"]


def match(patterns: list[str]) -> list[str]:
    return match_patterns(NAMES, patterns, key="model.freeze", kind="parameter", example="layer1.*")


def test_matches_keep_the_order_of_names_without_duplicates() -> None:
    assert match(["head.*", "blocks.?.weight", "*.bias"]) == ["blocks.0.weight", "blocks.1.weight", "head.bias"]


def test_pattern_without_a_match_is_an_error_with_similar_names() -> None:
    with pytest.raises(InputError, match=r"model.freeze: 'block.0.weight' matches no parameter") as caught:
        match(["head.*", "block.0.weight"])
    assert caught.value.code == "E_PATTERN"
    assert "blocks.0.weight" in str(caught.value)


def test_no_pattern_matches_nothing() -> None:
    assert match([]) == []
