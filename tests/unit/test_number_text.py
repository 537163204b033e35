"""Tests of the text forms of bytes and durations."""

import pytest

from samestep.errors import InputError
from samestep.number_text import format_bytes, parse_duration, plural


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (1000 * 2**10, "1,000 KiB"),
        (64 * 2**20, "64 MiB"),
        (5 * 2**30, "5 GiB"),
        (300 * 2**30, "300 GiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("text", "expected"), [("30", 30.0), ("30s", 30.0), ("1.5m", 90.0), ("2h", 7200.0), ("0.25", 0.25), ("007s", 7.0)]
)
def test_durations_with_and_without_a_unit(text: str, expected: float) -> None:
    assert parse_duration("--time", text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "s", "30d", "1e3", "nan", "inf", ""])
def test_invalid_duration_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="--time") as caught:
        parse_duration("--time", text)
    assert caught.value.code == "E_VALUE"
    assert "--time 30s" in str(caught.value)


@pytest.mark.parametrize(
    ("noun", "text"),
    [("epoch", "2 epochs"), ("microbatch", "2 microbatches"), ("process", "2 processes"), ("rank", "2 ranks")],
)
def test_plural(noun: str, text: str) -> None:
    assert plural(2, noun) == text
    assert plural(1, noun) == f"1 {noun}"
