"""What the values in a mask mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from samestep.errors import DataError

# As a target; neither losses nor metrics count it.
IGNORED = -100
FOREGROUND = ("foreground",)

Value = int | Sequence[int]
Numbers = NDArray[numpy.int16]


class MaskCode:
    """From the values in a mask to class numbers.

    Attributes:
        classes: names of the classes, one an output channel of the model: `foreground` alone, or all of them with the
            background.
        is_binary: numbers are 0 for background and 1 for the one class.
        has_colours: values are colours of three channels.

    Args:
        classes: as in a recipe; none means binary.
        values: of each class, numbers or colours `[R, G, B]`; of background and foreground if binary. By default class
            `i` is the value `i`, and a binary mask has 0 and either 1 or 255.
        ignored: values that nothing counts, such as an uncertain border.
        threshold: a binary mask's values from here on are foreground, as in JPEG files, whose values are blurred.

    Raises:
        DataError: the arguments contradict each other.
    """

    def __init__(
        self,
        classes: Sequence[str] | None = None,
        values: Sequence[Value] | None = None,
        ignored: Sequence[Value] = (),
        threshold: float | None = None,
    ) -> None:
        self.is_binary = classes is None
        self.classes = tuple(classes or FOREGROUND)
        self.has_colours = any(not isinstance(value, int) for value in values or ())
        self._threshold = threshold
        self._is_guessed = self.is_binary and values is None
        wanted = 2 if self.is_binary else len(self.classes)
        _require_fitting(self, values, wanted, threshold)
        given = list(values) if values is not None else list(range(wanted))
        codes = {_packed(value, self.has_colours): number for number, value in enumerate(given)}
        if self._is_guessed:
            codes[255] = 1
        codes |= {_packed(value, self.has_colours): IGNORED for value in ignored}
        self._known = numpy.array(sorted(codes), dtype=numpy.int64)
        self._codes = numpy.array([codes[int(value)] for value in self._known], dtype=numpy.int16)

    def numbers(self, values: NDArray[Any], name: str) -> Numbers:
        """Class numbers of a mask's values, `IGNORED` where nothing counts.

        Args:
            values: integers of any shape; with three channels last where values are colours.
            name: of the file, for errors.

        Raises:
            DataError: a value means nothing.
        """
        if self._threshold is not None:
            is_foreground: Numbers = (values >= self._threshold).astype(numpy.int16)
            return is_foreground
        packed = values.astype(numpy.int64)
        if self.has_colours:
            packed = (packed[..., 0] << 16) | (packed[..., 1] << 8) | packed[..., 2]
        places = numpy.searchsorted(self._known, packed).clip(max=len(self._known) - 1)
        is_known = self._known[places] == packed
        if not is_known.all():
            raise self._unknown(packed[~is_known], name)
        if self._is_guessed and (packed == 1).any() and (packed == 255).any():
            raise DataError(
                f"{name} has both of the values 1 and 255",
                rule="a binary mask has 0 and either 1 or 255",
                do="data.options.mask_values=[0, 255], and data.options.ignore_values=[1] if that means nothing",
            )
        found: Numbers = self._codes[places]
        return found

    def _unknown(self, strange: NDArray[numpy.int64], name: str) -> DataError:
        known = ", ".join(self._shown(int(value)) for value in self._known)
        threshold = ", or data.options.threshold=128 for blurred masks such as JPEG" if self.is_binary else ""
        return DataError(
            f"{name} has the value {self._shown(int(strange.min()))} ({strange.size} pixels mean nothing)",
            rule=f"the values of masks are {known}",
            do=f"mend the mask, or say what its values mean: data.options.mask_values, ignore_values{threshold}",
        )

    def _shown(self, value: int) -> str:
        return str([value >> 16, value >> 8 & 255, value & 255]) if self.has_colours else str(value)


def _require_fitting(code: MaskCode, values: Sequence[Value] | None, wanted: int, threshold: float | None) -> None:
    if len(set(code.classes)) < len(code.classes) or (not code.is_binary and wanted < 2):
        raise DataError(
            f"data.options.classes is {list(code.classes)}",
            rule="at least two names, all different; none for a binary mask",
            do="classes: [background, road, car]",
        )
    if values is not None and len(values) != wanted:
        raise DataError(
            f"data.options.mask_values has {len(values)} values for {wanted} classes",
            rule="one value a class, that of the background first",
            do="mask_values: [0, 255] for a binary mask",
        )
    if threshold is not None and not (code.is_binary and values is None):
        raise DataError(
            f"data.options.threshold is {threshold}",
            rule="a threshold is for binary masks without mask_values",
            do="remove one of them",
        )


def _packed(value: Value, is_colour: bool) -> int:
    if isinstance(value, int) and not is_colour:
        return value
    if isinstance(value, int) or len(value) != 3 or not all(0 <= part <= 255 for part in value):
        raise DataError(
            f"a value of masks is {value}",
            rule="whole numbers, or for all of them colours [R, G, B] of 0 to 255",
            do="mask_values: [[0, 0, 0], [255, 0, 0]]",
        )
    red, green, blue = value
    return red << 16 | green << 8 | blue
