"""Images with their masks: files of the same name in two folders, and class numbers of mask values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

from samestep.data.folder_files import by_suffix, files_below, left_out_notes
from samestep.errors import DataError
from samestep.zoo.images.files import file_errors, open_image
from samestep.zoo.options import is_number, require_option, require_path
from samestep.zoo.splits import train_validation_split

IGNORED = -100  # target that losses and metrics ignore

Value = int | Sequence[int]
ClassNumbers = NDArray[numpy.int16]

_MAX_VALUE = 2**63 - 1
_MAX_LISTED = 10  # files without a partner in an error


class Pair(NamedTuple):
    """Image or volume with its mask."""

    name: str  # path below the folder without suffix, with `/` as separator
    image: Path
    mask: Path


def split_pairs(
    suffixes: Sequence[str],
    path: str | None,
    images: str | None,
    masks: str | None,
    evaluation_path: str | None,
    evaluation_fraction: float,
    mask_suffix: str,
) -> tuple[list[Pair], list[Pair], tuple[str, ...]]:
    """Return the training pairs and the validation pairs, both sorted by name, and notes for the user.

    The arguments are options of `docs/guides/segmentation.md`, after the suffixes of the files; a suffix that ends in
    another one stands before that one.

    Raises:
        DataError: the options contradict each other, a folder is missing, there are no pairs or too few for a split,
            two files have the same name, or a file has no partner.
    """
    find = partial(_find_pairs, suffixes=suffixes, mask_suffix=mask_suffix)
    pairs, notes = find(*_folders(path, images, masks))
    if evaluation_path is not None:
        validation, validation_notes = find(*_folders(evaluation_path, None, None))
        return pairs, validation, (*notes, *validation_notes)
    parts = train_validation_split([pair.name for pair in pairs], evaluation_fraction, unit="pair")
    train, validation = ([pairs[index] for index in indices] for indices in parts)
    return train, validation, tuple(notes)


def _folders(path: str | None, images: str | None, masks: str | None) -> tuple[Path, Path]:
    if (path is None) != (images is not None and masks is not None) or (images is None) != (masks is None):
        raise DataError(
            f"data.options.path is {path}, images is {images}, masks is {masks}",
            expected="either path, a folder with the folders images and masks, or both of images and masks",
            fix="--set data.options.path=FOLDER",
            code="E_MISSING_KEY",
        )
    folders = Path(images or f"{path}/images"), Path(masks or f"{path}/masks")
    for folder in folders:
        require_path(
            folder,
            "folder",
            "data.options.path has the folders images and masks",
            "correct the path, or set data.options.images and data.options.masks",
        )
    return folders


def _find_pairs(
    image_folder: Path, mask_folder: Path, suffixes: Sequence[str], mask_suffix: str
) -> tuple[list[Pair], list[str]]:
    image_files, others = by_suffix(files_below(image_folder), suffixes)
    mask_files, mask_others = by_suffix(files_below(mask_folder), suffixes)
    notes = [*left_out_notes(image_folder, others, suffixes), *left_out_notes(mask_folder, mask_others, suffixes)]
    if mask_suffix and image_folder.samefile(mask_folder):
        endings = [f"{mask_suffix}{suffix}" for suffix in suffixes]
        image_files, mask_files = by_suffix(image_files, endings)[1], by_suffix(mask_files, endings)[0]
        notes = notes[:1]
    images = _by_name(image_folder, image_files, suffixes, "")
    masks = _by_name(mask_folder, mask_files, suffixes, mask_suffix)
    pairs = [Pair(name, images[name], masks[name]) for name in sorted(images.keys() & masks.keys())]
    if not pairs:
        raise DataError(
            f"no file in {image_folder} has a partner in {mask_folder} ({len(images)} images, {len(masks)} masks)",
            expected=f"images and masks of the same name that end in {', '.join(suffixes)}",
            fix="rename the files; data.options.mask_suffix=_mask for cat.jpg and cat_mask.png",
            code="E_MASK",
        )
    alone = [str(images[name]) for name in sorted(images.keys() - masks.keys())]
    alone += [str(masks[name]) for name in sorted(masks.keys() - images.keys())]
    if alone:
        raise DataError(
            f"{len(alone)} of the files have no partner: {', '.join(alone[:_MAX_LISTED])}",
            expected="a mask of the same name for every image, an image for every mask",
            fix="add the missing files, or remove these",
            code="E_MASK",
        )
    return pairs, notes


def _by_name(root: Path, paths: Sequence[Path], suffixes: Sequence[str], mask_suffix: str) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        suffix = next(suffix for suffix in suffixes if path.name.lower().endswith(suffix))
        name = path.relative_to(root).as_posix()[: -len(suffix)].removesuffix(mask_suffix)
        if name in files:
            raise DataError(
                f"{files[name]} and {path} have the same name",
                expected="one file per name, without its suffix",
                fix="remove or rename one of the files",
                code="E_MASK",
            )
        files[name] = path
    return files


class MaskCode:
    """Mapping from mask values to class numbers.

    Attributes:
        classes: class names, one per output channel of the model: `foreground` alone for binary masks, else all
            classes including the background.
        is_binary: class numbers are 0 for background and 1 for foreground.
        has_colors: mask values are RGB colors.

    Args:
        classes: class names of the recipe; None for binary masks.
        values: value of each class, integers or colors `[R, G, B]`; of background and foreground for binary masks. By
            default class `i` has the value `i`, and binary masks contain 0 and either 1 or 255.
        ignored: values that become `IGNORED`, such as an uncertain border.
        threshold: minimum foreground value of a binary mask, for JPEG files with blurred values.

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
        self.classes = tuple(classes or ("foreground",))
        self.has_colors = any(not isinstance(value, int) for value in values or ())
        self._threshold = threshold
        self._is_default_binary = self.is_binary and values is None
        count = 2 if self.is_binary else len(self.classes)
        self._require_valid(classes, values, count)
        codes = {self._packed(value): number for number, value in enumerate(range(count) if values is None else values)}
        if self._is_default_binary:
            codes[255] = 1
        self._ignored = [self._packed(value) for value in ignored]
        is_clear = values is None or len({*codes, *self._ignored}) == count + len(set(self._ignored))
        require_option("mask_values", values, is_clear, "different values, none of them in ignore_values", [0, 255])
        codes |= dict.fromkeys(self._ignored, IGNORED)
        self._known = numpy.array(sorted(codes), dtype=numpy.int64)
        self._codes = numpy.array([codes[int(value)] for value in self._known], dtype=numpy.int16)

    def _require_valid(self, classes: object, values: Sequence[Value] | None, count: int) -> None:
        is_list = classes is None or (isinstance(classes, list | tuple) and count >= 2)
        is_names = is_list and len(set(self.classes)) == len(self.classes)
        names = "at least two different names, or null for binary masks"
        require_option("classes", classes, is_names, names, "[background, road]")
        is_complete = values is None or len(values) == count
        require_option("mask_values", values, is_complete, f"one value for each of {count} classes", [0, 255])
        is_threshold = is_number(self._threshold) and self._is_default_binary
        rule = "a number, for binary masks without mask_values, or null"
        require_option("threshold", self._threshold, self._threshold is None or is_threshold, rule, 128)

    def numbers(self, values: NDArray[Any], name: str) -> ClassNumbers:
        """Return the class numbers of mask values, `IGNORED` for ignored values.

        Args:
            values: integers of any shape; colors have three channels last.
            name: file name, for errors.

        Raises:
            DataError: a value is unknown.
        """
        if self._threshold is not None:
            is_foreground: ClassNumbers = (values >= self._threshold).astype(numpy.int16)
            is_foreground[numpy.isin(values, self._ignored)] = IGNORED
            return is_foreground
        packed = values.astype(numpy.int64)
        if self.has_colors:
            packed = (packed[..., 0] << 16) | (packed[..., 1] << 8) | packed[..., 2]
        indices = numpy.searchsorted(self._known, packed).clip(max=len(self._known) - 1)
        unknown = packed[self._known[indices] != packed]
        if unknown.size:
            threshold = ", or data.options.threshold=128 for blurred masks such as JPEG" if self.is_binary else ""
            raise DataError(
                f"{name} has the unknown value {self._format(unknown.min())} ({unknown.size} such pixels)",
                expected=f"mask values {', '.join(map(self._format, self._known))}",
                fix=f"correct the mask, or set data.options.mask_values or ignore_values{threshold}",
                code="E_MASK",
            )
        foreground = {1, 255} - set(self._ignored)
        if self._is_default_binary and foreground == {1, 255} and all((packed == value).any() for value in foreground):
            raise DataError(
                f"{name} has both of the values 1 and 255",
                expected="0 and either 1 or 255 in a binary mask",
                fix="data.options.ignore_values=[255] or [1], to ignore one of them",
                code="E_MASK",
            )
        numbers: ClassNumbers = self._codes[indices]
        return numbers

    def _format(self, value: numpy.int64) -> str:
        number = int(value)
        return str([number >> 16, number >> 8 & 255, number & 255]) if self.has_colors else str(number)

    def _packed(self, value: Value) -> int:
        """Return an integer, or a color as `0xRRGGBB`."""
        if isinstance(value, int) and not self.has_colors and abs(value) <= _MAX_VALUE:
            return value
        is_color = not isinstance(value, int) and len(value) == 3 and all(0 <= part <= 255 for part in value)
        rule = "integers of 64 bits only, or colors [R, G, B] of 0 to 255 only"
        require_option("mask_values", value, is_color, rule, "[[0, 0, 0], [255, 0, 0]]")
        assert not isinstance(value, int)
        red, green, blue = value
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
    if image.mode in ("1", "L", "P", "I") or image.mode.startswith("I;16"):
        return values.astype(numpy.int64)
    if image.mode in ("LA", "PA"):
        return values[..., 0]
    if image.mode not in ("RGB", "RGBA"):
        raise ValueError(f"the mode is {image.mode}; masks contain integers or RGB colors")
    if (values[..., :3] != values[..., :1]).any():
        raise ValueError("the mask has colors; set data.options.mask_values to colors: [[0, 0, 0], [255, 0, 0]]")
    return values[..., 0]


def as_target(numbers: torch.Tensor, *, is_binary: bool) -> torch.Tensor:
    """Return class numbers as the target of a loss for one output channel, or for several."""
    return numbers.to(torch.float32).unsqueeze(0) if is_binary else numbers.to(torch.int64)
