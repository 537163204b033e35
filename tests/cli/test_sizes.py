"""Sizes as people type them."""

import pytest

from samestep.cli.sizes import size
from samestep.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("2 GB", 2 << 30), ("1kib", 1024)]
)
def test_sizes_with_and_without_a_unit(text: str, expected: int) -> None:
    assert size("--size", text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "1 parsec", "1e3", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--size") as caught:
        size("--size", text)
    assert "--size 1GiB" in str(caught.value)
