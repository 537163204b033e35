"""Times as people type them."""

import pytest

from samestep.cli.durations import seconds


@pytest.mark.parametrize(
    ("text", "expected"), [("30", 30.0), ("30s", 30.0), ("1.5m", 90.0), ("2h", 7200.0), ("0.25", 0.25), ("007s", 7.0)]
)
def test_times_with_and_without_a_unit(text: str, expected: float) -> None:
    assert seconds("--time", text) == expected
