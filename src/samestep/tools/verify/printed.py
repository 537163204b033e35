"""Numbers that a script prints: those of two runs, and those that vary between equal runs, such as times."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\bnan\b|\binf\b")
# A time, a rate, or a part of the date.
_TIME = re.compile(
    r"[-+]?\d+(?:\.\d+)?\s?(?:s|ms|us|µs|ns|sec|secs|seconds|min|minutes)?\s?/?\s?(?:it|samples|images|tokens)?/s\b"
    r"|[-+]?\d+(?:\.\d+)?\s?(?:s|ms|us|µs|ns|sec|secs|seconds|min|minutes)\b"
    r"|\d+(?::\d\d)+(?:\.\d+)?|\d{4}-\d\d-\d\d"
)
_FACTOR = 16.0  # as for other quantities


@dataclass(frozen=True)
class Printed:
    """Lines of the reference.

    Attributes:
        lines: lines that rank 0 printed.
        repeated: lines of another run on the same number of processes, whose other numbers are no
            results.
    """

    lines: Sequence[str]
    repeated: Sequence[str]

    @property
    def count(self) -> int:
        """Number of numbers in the lines."""
        return sum(len(_split(line)[1]) for line in self.lines)


def differing_lines(
    printed: Printed, other: Sequence[str], *, is_exact: bool
) -> Iterator[tuple[str, float | None]]:
    """Yield both texts of each line that differs, and the largest distance of its numbers if it was measured.

    Args:
        printed: lines of the reference.
        other: lines of the other run.
        is_exact: whether equal text is required.
    """
    if len(printed.lines) != len(other) and len(printed.lines) == len(printed.repeated):
        yield f"{len(printed.lines)} lines and {len(other)} lines", None
        return
    for line, repeated, actual in zip_longest(printed.lines, printed.repeated, other):
        if line is None or repeated is None or actual is None or line == actual:
            continue
        words, numbers = _split(line)
        other_words, others = _split(actual)
        repeated_words, repeated_numbers = _split(repeated)
        if words != repeated_words or len(numbers) != len(repeated_numbers):
            continue  # text of one run, such as a path
        detail = f"{line.strip()!r} and {actual.strip()!r}"
        if words != other_words:
            yield detail, None
            continue
        distances = [
            _distance(*texts, is_exact=is_exact)
            for texts in zip(numbers, repeated_numbers, others, strict=True)
        ]
        if max(distances, default=0.0) > 0:
            yield detail, max(distances)


def _split(line: str) -> tuple[str, list[str]]:
    """Return a line without numbers and times, and its numbers as text."""
    line = _TIME.sub("<time>", line)
    return _NUMBER.sub("<number>", line), _NUMBER.findall(line)


def _distance(text: str, repeated: str, other: str, *, is_exact: bool) -> float:
    """Return the relative distance of two printed numbers, without the distance of two equal runs; 0 if equal."""
    if text == other:
        return 0.0
    value = float(text)
    again = float(repeated)
    actual = float(other)
    varies = abs(value - again)
    if is_exact:
        if varies:
            return 0.0
        return 1.0
    digits = len(text.partition(".")[2]) if "e" not in text.lower() else 0
    last_digit = 10.0**-digits if "." in text and digits else 0.0
    difference = abs(value - actual) - _FACTOR * varies - 1.01 * last_digit
    if math.isnan(difference):
        if math.isnan(value) and math.isnan(actual):
            return 0.0
        return 1.0
    return max(0.0, difference) / max(abs(value), abs(actual))
