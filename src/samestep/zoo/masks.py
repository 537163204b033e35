"""Pairs of images and masks, and class numbers of mask values."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
from numpy.typing import NDArray
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from samestep.config.validation import require_path
from samestep.errors import DataError
from samestep.zoo.data_files import files_below
from samestep.zoo.image_files import IMAGE_SUFFIXES, file_errors, open_image
from samestep.zoo.losses import IGNORED
from samestep.zoo.validation_split import train_validation_split

_Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Byte = Annotated[int, Field(ge=0, le=255)]
_Color = tuple[_Byte, _Byte, _Byte]
_Values = tuple[_Number, ...] | tuple[_Color, ...]
ClassNumbers = NDArray[numpy.int16]  # signed, for `IGNORED`

_MAX_LISTED = 10  # files without a partner in an error


class Pair(NamedTuple):
    """Image with its mask."""

    name: str  # path below the folder without suffix, with `/` as separator
    image: Path
    mask: Path


def split_pairs(
    path: str, evaluation_path: str | None, evaluation_fraction: float, mask_suffix: str
) -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs and the validation pairs, both sorted by name.

    The arguments are options of `docs/guides/segmentation.md`.

    Raises:
        DataError: a folder is missing, there are too few pairs for a split, or a file has no
            partner.
    """
    pairs = _find_pairs(Path(path), mask_suffix)
    if evaluation_path is not None:
        return pairs, _find_pairs(Path(evaluation_path), mask_suffix)
    parts = train_validation_split([pair.name for pair in pairs], evaluation_fraction, unit="pair")
    train, validation = ([pairs[index] for index in indices] for indices in parts)
    return train, validation


def _find_pairs(root: Path, mask_suffix: str) -> list[Pair]:
    images = _by_name(root / "images", "")
    masks = _by_name(root / "masks", mask_suffix)
    alone = [images[name] for name in sorted(images.keys() - masks.keys())]
    alone += [masks[name] for name in sorted(masks.keys() - images.keys())]
    if alone or not images:
        listed = ", ".join(map(str, alone[:_MAX_LISTED]))
        raise DataError(
            f"{root} has {len(images)} images and {len(masks)} masks, {len(alone)} without a "
            f"partner: {listed}",
            expected=f"images and masks of the same name that end in {', '.join(IMAGE_SUFFIXES)}",
            fix="add, rename or remove files; data.options.mask_suffix=_mask for cat.jpg and "
            "cat_mask.png",
            code="E_MASK",
        )
    return [Pair(name, images[name], masks[name]) for name in sorted(images)]


def _by_name(folder: Path, mask_suffix: str) -> dict[str, Path]:
    require_path(folder, "folder", "data.options.path has the folders images and masks")
    files: dict[str, Path] = {}
    for path in files_below(folder, IMAGE_SUFFIXES):
        name = path.relative_to(folder).with_suffix("").as_posix().removesuffix(mask_suffix)
        if name in files:
            raise DataError(
                f"{files[name]} and {path} have the same name",
                expected="one file per name, without its suffix",
                fix="remove or rename one of the files",
                code="E_MASK",
            )
        files[name] = path
    return files


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MaskCode:
    """Mapping from mask values to class numbers: options of the dataset.

    Attributes:
        classes: names of all classes including the background; None for binary masks.
        mask_values: value of each class, numbers or colors `[R, G, B]`; of background and
            foreground for binary masks. By default class `i` has the value `i`, and binary masks
            contain 0 and either 1 or 255.
        ignore_values: values that become `IGNORED`, such as an uncertain border.
    """

    classes: tuple[str, ...] | None = None
    mask_values: _Values | None = None
    ignore_values: _Values = ()

    def __post_init__(self) -> None:
        names = set(self.classes or ("background", "foreground"))
        if len(names) < 2 or len(names) < len(self.classes or ()):
            raise ValueError("classes are not at least two different names")
        if len(self._values) != len(names):
            raise ValueError(f"mask_values are not one value for each of {len(names)} classes")
        every = (*self._values, *self.ignore_values)
        if self.mask_values is not None and len(set(every)) < len(every):
            raise ValueError("a value is in mask_values or ignore_values twice")
        if len({isinstance(value, int) for value in every}) > 1:
            raise ValueError("mask_values and ignore_values are both numbers and colors")

    @property
    def _values(self) -> _Values:
        """Value of each class."""
        if self.mask_values is None:
            return tuple(range(len(self.classes or (0, 1))))
        return self.mask_values

    @property
    def is_binary(self) -> bool:
        """Whether class numbers are 0 for background and 1 for foreground."""
        return self.classes is None

    @property
    def names(self) -> tuple[str, ...]:
        """Class names, one per output channel of the model: `foreground` alone for binary masks."""
        return self.classes or ("foreground",)

    @property
    def has_colors(self) -> bool:
        """Whether mask values are colors."""
        return any(not isinstance(value, int) for value in self.mask_values or ())

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Class number of each value, in ascending order of the values; a color is `0xRRGGBB`."""
        numbers = {_packed(value): number for number, value in enumerate(self._values)}
        if self.is_binary and self.mask_values is None:
            numbers[255] = 1
        numbers |= {_packed(value): IGNORED for value in self.ignore_values}
        return dict(sorted(numbers.items()))

    def numbers(self, values: NDArray[Any], name: str) -> ClassNumbers:
        """Return the class numbers of mask values, `IGNORED` for ignored values.

        Args:
            values: integers of any shape; colors have three channels last.
            name: file name, for errors.

        Raises:
            DataError: a value is unknown.
        """
        # One integer per pixel, for the binary search below.
        packed = values.astype(numpy.int64)
        if self.has_colors:
            packed = (packed[..., 0] << 16) | (packed[..., 1] << 8) | packed[..., 2]
        known = numpy.array(list(self._numbers), dtype=numpy.int64)
        # The index of a value above all known ones is one after the last.
        indices = numpy.searchsorted(known, packed).clip(max=len(known) - 1)
        unknown = packed[known[indices] != packed]
        if unknown.size:
            form = "#08x" if self.has_colors else "d"
            known_values = ", ".join(f"{value:{form}}" for value in self._numbers)
            raise DataError(
                f"{name} has the unknown value {unknown.min():{form}} ({unknown.size} such pixels)",
                expected=f"mask values {known_values}",
                fix="correct the mask, or set data.options.mask_values or ignore_values",
                code="E_MASK",
            )
        numbers = numpy.array(list(self._numbers.values()), dtype=numpy.int16)
        classes: ClassNumbers = numbers[indices]
        return classes


def _packed(value: Any) -> int:
    """Return a number, or a color `[R, G, B]` as `0xRRGGBB`."""
    if isinstance(value, int):
        return value
    red, green, blue = map(int, value)
    return red << 16 | green << 8 | blue


def read_mask(path: Path, code: MaskCode) -> ClassNumbers:
    """Return the class numbers `(H, W)` of an image file.

    Values of an image with a palette are palette indices, unless the values of `code` are colors.

    Raises:
        DataError: the file is missing, damaged or no image, or has unknown values.
        RunError: the disk or the network failed.
    """
    with file_errors(path, "a mask"), open_image(path) as image:
        values = numpy.asarray(image.convert("RGB")) if code.has_colors else _integers(image)
    return code.numbers(values, str(path))


def _integers(image: Image.Image) -> NDArray[Any]:
    values = numpy.asarray(image)
    if values.ndim == 3:  # channels of equal values
        if image.mode in ("LA", "RGBA"):
            values = values[..., :-1]  # without the opacity
        if (values != values[..., :1]).any():
            raise ValueError(
                "the mask has colors; set data.options.mask_values to colors: "
                "[[0, 0, 0], [255, 0, 0]]"
            )
        values = values[..., 0]
    if values.dtype.kind not in "bui":
        raise ValueError(f"the mode is {image.mode}; masks contain integers or RGB colors")
    return values
