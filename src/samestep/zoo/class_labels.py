"""Class numbers of labels, which are integers or texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MAX_LISTED = 20  # labels in an error
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_CLASS_NUMBER = re.compile(r"0*[0-9]{1,9}")


class ClassLabels:
    """Class numbers of labels: integers are class numbers, texts are class names.

    A text can also be a class number, unless some names are other numbers: with names 1 to 3, a label 2 is ambiguous.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(classes)}
        are_same = all(name == str(number) for name, number in self._numbers.items())
        self._reads_numbers = are_same or not any(_NUMBER.fullmatch(name.strip()) for name in classes)

    def number(self, label: str | int) -> int | None:
        """Return the class number of a label, or None if it is not a class."""
        if isinstance(label, str):
            name = label if label in self._numbers else label.strip()
            if name in self._numbers:
                return self._numbers[name]
            label = int(name) if self._reads_numbers and _CLASS_NUMBER.fullmatch(name) else -1
        return label if 0 <= label < len(self._numbers) else None

    def expected(self, label: object) -> str:
        """Return the classes as labels of the same kind as `label`, for errors."""
        numbers = f"a class number, 0 to {len(self._numbers) - 1}"
        if not isinstance(label, str | bytes):
            return numbers
        names = f"a class, such as {', '.join(list(self._numbers)[:_MAX_LISTED])}"
        return f"{names}, or {numbers}" if self._reads_numbers else names
