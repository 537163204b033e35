"""Class numbers of labels."""

from collections.abc import Sequence

import pytest

from samestep.errors import DataError
from samestep.zoo.labels import ClassLabels

CLASSES = ["cat", "dog", "bird"]
NUMBERS = ["1", "2", "3"]
NOT_FINITE = ["nan", "inf", "-3e"]
INDICES = ["0", "1", "2"]


@pytest.mark.parametrize(
    ("classes", "label", "number"),
    [
        *[(CLASSES, "cat", 0), (CLASSES, "dog\n", 1), (CLASSES, "0", 0), (CLASSES, "02", 2), (CLASSES, "2\n", 2)],
        *[(NUMBERS, "1", 0), (NUMBERS, "3", 2)],
        *[(NOT_FINITE, "inf", 1), (NOT_FINITE, "02", 2)],
        *[(INDICES, "2", 2), (INDICES, "02", 2)],
    ],
)
def test_labels_are_names_or_numbers(classes: Sequence[str], label: str, number: int) -> None:
    assert ClassLabels(classes).number(label, "a.csv") == number


@pytest.mark.parametrize(
    ("classes", "label"),
    [
        *[(NUMBERS, "0"), (NUMBERS, "01"), (INDICES, "03")],
        *[(CLASSES, "-1"), (CLASSES, "1_0"), (CLASSES, "9" * 5000), (CLASSES, "fish"), (CLASSES, "0.5")],
    ],
)
def test_label_that_is_no_class_is_refused(classes: Sequence[str], label: str) -> None:
    with pytest.raises(DataError, match=r"a\.csv") as error:
        ClassLabels(classes).number(label, "a.csv")
    assert error.value.code == "E_CLASSES"
