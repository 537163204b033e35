"""Volumes with masks: random patches for training, and a grid of patches for validation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from samestep.data.sample_files import fingerprint_of
from samestep.errors import DataError
from samestep.metrics.overlays import areas, blended, class_map, scaled_image
from samestep.zoo.image_files import file_errors
from samestep.zoo.losses import IGNORED
from samestep.zoo.masks import ClassNumbers, MaskCode, Pair, as_target, split_pairs
from samestep.zoo.options import import_optional, unusable, validated
from samestep.zoo.splits import Splits, Task

VOLUME_SUFFIXES = (".nii.gz", ".nii", ".npy")
_KEPT_VOLUMES = 4  # in the memory of a process

Voxels = NDArray[numpy.float32]
_Count = Annotated[int, Field(ge=1)]
Sample = tuple[torch.Tensor, torch.Tensor]
# Start of a patch along one axis, and the first voxel that earlier patches do not cover.
Interval = tuple[int, int]


def _open(path: Path) -> Any:
    """Return an array with values that are read on access.

    Damaged files raise exceptions of many types.
    """
    if path.name.lower().endswith(".npy"):
        array: Any = numpy.load(path, mmap_mode="r", allow_pickle=False)
    else:
        array = import_optional("nibabel", str(path)).load(path).dataobj
    if len(array.shape) != 3 or 0 in array.shape:
        raise ValueError(f"the shape is {array.shape}; volumes have three dimensions")
    return array


def read_volume(path: Path) -> Voxels:
    """Return the finite values `(D, H, W)` of a volume in the axis order of the file."""
    with file_errors(path, "a volume"):
        values = numpy.asarray(_open(path)).astype(numpy.float32)
        if count := values.size - int(numpy.isfinite(values).sum()):
            raise ValueError(f"{count} values that are not finite")
    return values


def read_pair(pair: Pair, code: MaskCode) -> tuple[Voxels, ClassNumbers]:
    """Return a volume and the class numbers of its mask, which have the same shape."""
    volume = read_volume(pair.image)
    with file_errors(pair.mask, "a mask"):
        values = numpy.asarray(_open(pair.mask))
        integers = values.astype(numpy.int64)
        if not numpy.array_equal(integers, values):
            raise ValueError("some values are not integers")
    mask = code.numbers(integers, str(pair.mask))
    if volume.shape != mask.shape:
        problem = f"{pair.mask} has the shape {mask.shape}, {pair.image} has {volume.shape}"
        expected = "masks of the shape of their volumes"
        raise unusable(problem, expected, "correct the pair and resume", "E_MASK")
    return volume, mask


class Volumes:
    """Normalized volumes with their masks and a cache of the most recent ones.

    Args:
        window: minimum and maximum; values outside are clipped.
    """

    def __init__(
        self, pairs: Sequence[Pair], code: MaskCode, window: Sequence[float] | None
    ) -> None:
        self.pairs = pairs
        self.code = code
        self._window = window
        self.read = lru_cache(maxsize=_KEPT_VOLUMES)(self._read)

    def _read(self, index: int) -> Sample:
        """Return values `(1, D, H, W)` and class numbers `(D, H, W)`."""
        volume, mask = read_pair(self.pairs[index], self.code)
        return torch.from_numpy(normalize(volume, self._window))[None], torch.from_numpy(mask)


def normalize(volume: Voxels, window: Sequence[float] | None) -> Voxels:
    """Return a volume with mean 0 and standard deviation 1; a constant volume becomes 0."""
    values: NDArray[numpy.float64] = volume.astype(numpy.float64)
    if window is not None:
        values = values.clip(window[0], window[1])
    scaled: Voxels = ((values - values.mean()) / (float(values.std()) or 1.0)).astype(numpy.float32)
    return scaled


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PatchOptions:
    """Patches of volumes: options of the dataset.

    Attributes:
        patch_size: side of a patch in voxels, or three sides.
        patches: random patches per training volume.
        foreground_share: probability that a patch is centered on a foreground voxel, if the volume
            has any.
        flips: flip each axis with probability 0.5.
        window: minimum and maximum; values outside are clipped.
    """

    patch_size: _Count | tuple[_Count, _Count, _Count] = 64
    patches: _Count = 4
    foreground_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    flips: bool = True
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.window[0] < self.window[1]:
            raise ValueError("window is not a minimum and a maximum")

    @property
    def sides(self) -> tuple[int, int, int]:
        """Sides of a patch."""
        if isinstance(self.patch_size, int):
            return (self.patch_size,) * 3
        return self.patch_size


class RandomPatches:
    """Random patches, a fixed number per volume, drawn again in each epoch."""

    def __init__(self, volumes: Volumes, options: PatchOptions) -> None:
        self._volumes = volumes
        self._size = options.sides
        self._patches = options.patches
        self._share = options.foreground_share
        self._flips = options.flips

    def __len__(self) -> int:
        return len(self._volumes.pairs) * self._patches

    def __getitem__(self, index: int) -> Sample:
        values, numbers = self._volumes.read(index // self._patches)
        start = self._random_start(numbers)
        patch = crop(values, start, self._size, 0)
        target = crop(numbers[None], start, self._size, IGNORED)[0]
        draws = torch.rand(3).tolist()
        axes = [axis for axis in range(3) if self._flips and draws[axis] < 0.5]
        patch = patch.flip([axis + 1 for axis in axes])
        target = target.flip(axes)
        return patch, as_target(target, is_binary=self._volumes.code.is_binary)

    def _random_start(self, numbers: torch.Tensor) -> list[int]:
        # The same numbers are drawn with and without a foreground voxel in the center.
        centered, choice, *position = torch.rand(5, dtype=torch.float64).tolist()
        foreground = numbers.new_empty(0, 3)
        if centered < self._share:
            foreground = (numbers > 0).nonzero()
        starts = []
        for axis, side in enumerate(self._size):
            limit = max(0, numbers.shape[axis] - side)
            start = int(position[axis] * (limit + 1))
            if len(foreground):
                center = int(foreground[int(choice * len(foreground)), axis])
                start = min(max(0, center - side // 2), limit)
            starts.append(start)
        return starts


class Tiles:
    """Grid of patches in which every voxel of every volume is a target once.

    The last patch along an axis overlaps the previous one to have full size; the overlap is
    ignored.
    """

    def __init__(self, volumes: Volumes, size: tuple[int, ...]) -> None:
        self._volumes = volumes
        self._size = size
        self._tiles: list[tuple[int, tuple[Interval, ...]]] = []
        for number, pair in enumerate(volumes.pairs):
            try:
                with file_errors(pair.image, "a volume"):
                    shape = _open(pair.image).shape  # only the header is read
            except DataError:
                shape = (1, 1, 1)  # one tile: its access raises the error
            axes = [tile_axis(length, side) for length, side in zip(shape, size, strict=True)]
            self._tiles += [(number, tile) for tile in product(*axes)]

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> Sample:
        number, tile = self._tiles[index]
        values, numbers = self._volumes.read(number)
        starts = [start for start, _ in tile]
        patch = crop(values, starts, self._size, 0)
        target = crop(numbers[None], starts, self._size, IGNORED)[0].clone()
        for axis, (start, fresh) in enumerate(tile):
            target.narrow(axis, 0, fresh - start).fill_(IGNORED)
        return patch, as_target(target, is_binary=self._volumes.code.is_binary)


def tile_axis(length: int, side: int) -> list[Interval]:
    """Return the intervals that cover one axis."""
    return [(min(fresh, max(0, length - side)), fresh) for fresh in range(0, length, side)]


def crop(
    values: torch.Tensor, start: Sequence[int], size: tuple[int, ...], fill: float
) -> torch.Tensor:
    """Return the part of `values` `(C, D, H, W)` at `start`, padded with `fill` at the end."""
    spans = [slice(begin, begin + side) for begin, side in zip(start, size, strict=True)]
    part = values[(slice(None), *spans)]
    if part.shape[1:] == size:
        return part
    padded = part.new_full((len(part), *size), fill)
    padded[(slice(None), *(slice(0, side) for side in part.shape[1:]))] = part
    return padded


def load_volumes(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    mask_suffix: str = "",
    classes: Sequence[str] | None = None,
    mask_values: Sequence[int] | None = None,
    ignore_values: Sequence[int] = (),
    **options: Any,
) -> Splits:
    """Return volumes and masks, with the options of `docs/guides/segmentation.md`.

    Raises:
        InputError: a folder is missing, files have no partner, or an option is invalid.
    """
    chosen = validated(PatchOptions, options, loader=load_volumes)
    values = {"classes": classes, "mask_values": mask_values, "ignore_values": ignore_values}
    code = validated(MaskCode, values)
    pairs, evaluation_pairs = split_pairs(
        VOLUME_SUFFIXES, path, evaluation_path, evaluation_fraction, mask_suffix
    )
    return Splits(
        train=RandomPatches(Volumes(pairs, code, chosen.window), chosen),
        evaluation=Tiles(Volumes(evaluation_pairs, code, chosen.window), chosen.sides),
        classes=code.names,
        reads_files=True,
        fingerprint=fingerprint_of([pair.name for pair in pairs]),
    )


def volumes_task(classes: Sequence[str], *, window: Sequence[float] | None = None) -> Task:
    """Return the task that segments a volume: shares of classes, and the middle slice in colors."""

    def read(path: Path) -> torch.Tensor:
        return torch.from_numpy(normalize(read_volume(path), window))[None]

    def picture(path: Path, outputs: torch.Tensor) -> Image.Image:
        numbers = class_map(outputs)
        middle = len(numbers) // 2
        image = scaled_image(read(path)[:, middle])
        return blended(image, numbers[middle], is_binary=len(classes) == 1)

    return Task(
        reads="a volume (NIfTI or NumPy)",
        read=read,
        describe=lambda outputs: {"areas": areas(class_map(outputs), classes)},
        picture=picture,
    )
