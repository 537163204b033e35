"""Volumes and masks of the same name, in patches: random ones to train on, all of them to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

from samestep.errors import DataError
from samestep.recipes.masks.code import IGNORED, MaskCode
from samestep.recipes.masks.pairs import Pair, Unpaired, find_pairs, folders_of, train_and_evaluation
from samestep.recipes.masks.segmentation import as_target
from samestep.recipes.masks.volume_files import ENDINGS, Voxels, read_pair, read_volume, read_volume_mask, shape_of
from samestep.recipes.splits import Splits
from samestep.recipes.task import Answer, Task
from samestep.record.overlays import areas, blended, class_map

Size = tuple[int, int, int]
Sample = tuple[torch.Tensor, torch.Tensor]


class Volumes:
    """Volumes with their masks, normalised; the last few stay in memory, so that their patches are read once.

    Args:
        window: values outside of these two become the nearest of them.
        kept: how many stay; changes time and memory, and no result.
    """

    def __init__(self, pairs: Sequence[Pair], code: MaskCode, window: Sequence[float] | None, kept: int) -> None:
        self.pairs, self.code, self._window = pairs, code, window
        self.read = lru_cache(maxsize=kept)(self._read)

    def _read(self, index: int) -> Sample:
        """Values `(1, D, H, W)` and class numbers `(D, H, W)`."""
        volume, mask = read_pair(self.pairs[index], self.code)
        return torch.from_numpy(normalised(volume, self._window))[None], torch.from_numpy(mask)

    def foreground_of(self, index: int) -> tuple[int, int]:
        """Background and foreground voxels of a binary mask."""
        numbers = read_volume_mask(self.pairs[index].mask, self.code)
        return int((numbers == 0).sum()), int((numbers == 1).sum())


def normalised(volume: Voxels, window: Sequence[float] | None) -> Voxels:
    """A volume with mean 0 and standard deviation 1; one that is the same everywhere becomes 0."""
    values: NDArray[numpy.float64] = volume.astype(numpy.float64)
    if window is not None:
        values = values.clip(window[0], window[1])
    spread = float(values.std())
    scaled: Voxels = ((values - values.mean()) / (spread or 1.0)).astype(numpy.float32)
    return scaled


class RandomPatches:
    """Patches of volumes, so many of each; which ones is drawn anew in each epoch.

    Args:
        foreground_share: so many of the patches have some voxel of foreground near their centre, if there is any.
        flips: each axis is mirrored in half of them.
    """

    def __init__(self, volumes: Volumes, size: Size, patches: int, foreground_share: float, *, flips: bool) -> None:
        self._volumes, self._size, self._patches = volumes, size, patches
        self._share, self._flips = foreground_share, flips

    def __len__(self) -> int:
        return len(self._volumes.pairs) * self._patches

    def __getitem__(self, index: int) -> Sample:
        values, numbers = self._volumes.read(index // self._patches)
        start = self._start(numbers)
        patch, target = cut(values, start, self._size, 0), cut(numbers[None], start, self._size, IGNORED)[0]
        axes = [axis for axis, side in enumerate(torch.rand(3).tolist()) if self._flips and side < 0.5]
        patch, target = patch.flip([axis + 1 for axis in axes]), target.flip(axes)
        return patch, as_target(target, is_binary=self._volumes.code.is_binary)

    def foreground_of(self, index: int) -> tuple[int, int]:
        """Background and foreground of a whole mask; nothing for all but the first patch of a volume."""
        number, patch = divmod(index, self._patches)
        return (0, 0) if patch else self._volumes.foreground_of(number)

    def _start(self, numbers: torch.Tensor) -> list[int]:
        """Where a random patch begins."""
        wants, which, *places = torch.rand(5, dtype=torch.float64).tolist()
        room = [max(0, have - wanted) for have, wanted in zip(numbers.shape, self._size, strict=True)]
        foreground = (numbers > 0).nonzero() if wants < self._share else numbers.new_empty(0, 3)
        if not len(foreground):
            return [int(place * (most + 1)) for place, most in zip(places, room, strict=True)]
        centre = foreground[int(which * len(foreground))].tolist()
        starts = [middle - side // 2 for middle, side in zip(centre, self._size, strict=True)]
        return [min(max(0, start), most) for start, most in zip(starts, room, strict=True)]


class Tile(NamedTuple):
    """A patch of the grid that covers a volume.

    Attributes:
        volume: its number.
        start: where the patch begins.
        fresh: where what no tile before it has covered begins, in the volume.
    """

    volume: int
    start: tuple[int, ...]
    fresh: tuple[int, ...]


class Tiles:
    """Patches that cover every voxel of every volume, each once.

    The last patch along an axis begins early enough to be whole, and what others have covered is ignored in it.
    """

    def __init__(self, volumes: Volumes, size: Size) -> None:
        self._volumes, self._size = volumes, size
        self._tiles = [tile for number, pair in enumerate(volumes.pairs) for tile in _tiles(number, pair, size)]

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> Sample:
        tile = self._tiles[index]
        values, numbers = self._volumes.read(tile.volume)
        patch = cut(values, tile.start, self._size, 0)
        target = cut(numbers[None], tile.start, self._size, IGNORED)[0].clone()
        for axis, (start, fresh) in enumerate(zip(tile.start, tile.fresh, strict=True)):
            target.narrow(axis, 0, fresh - start).fill_(IGNORED)
        return patch, as_target(target, is_binary=self._volumes.code.is_binary)


def tiling(length: int, side: int) -> list[tuple[int, int]]:
    """Along one axis, where patches of `side` begin and where what is new in them begins."""
    return [(min(fresh, max(0, length - side)), fresh) for fresh in range(0, length, side)]


def cut(values: torch.Tensor, start: Sequence[int], size: Size, fill: float) -> torch.Tensor:
    """The part of `(C, D, H, W)` that begins at `start`; what lies beyond the end is `fill`."""
    part = values[(slice(None), *(slice(begin, begin + side) for begin, side in zip(start, size, strict=True)))]
    if part.shape[1:] == size:
        return part
    whole = part.new_full((len(part), *size), fill)
    whole[(slice(None), *(slice(0, side) for side in part.shape[1:]))] = part
    return whole


def _tiles(number: int, pair: Pair, size: Size) -> list[Tile]:
    try:
        shape = shape_of(pair.image)
    except DataError:
        shape = (1, 1, 1)  # one tile, so that who reads it is told what is wrong
    axes = (tiling(length, side) for length, side in zip(shape, size, strict=True))
    return [
        Tile(number, tuple(start for start, _ in tile), tuple(fresh for _, fresh in tile)) for tile in product(*axes)
    ]


def load_volumes(
    path: str | None = None,
    *,
    images: str | None = None,
    masks: str | None = None,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    mask_suffix: str = "",
    unpaired: Unpaired = "stop",
    classes: Sequence[str] | None = None,
    mask_values: Sequence[int] | None = None,
    ignore_values: Sequence[int] = (),
    patch_size: int | Sequence[int] = 64,
    patches: int = 4,
    foreground_share: float = 0.5,
    flips: bool = True,
    window: Sequence[float] | None = None,
    kept_volumes: int = 4,
) -> Splits:
    """Volumes and masks; see `docs/segmentation.md` for what each option does.

    Args:
        path: a folder with the folders `images` and `masks`; or give `images` and `masks`.
        classes: names of all classes with the background; none for binary masks.
        patch_size: voxels of a side, or three sides, of what the model sees.

    Raises:
        DataError: a folder is missing, files have no partner, or options contradict each other.
    """
    _require_options(patches, foreground_share, window, kept_volumes)
    code, size = MaskCode(classes, mask_values, ignore_values), _size(patch_size)
    find = partial(find_pairs, endings=ENDINGS, mask_suffix=mask_suffix, unpaired=unpaired)
    train, evaluation, notes = train_and_evaluation(
        find, folders_of(path, images, masks), evaluation_path, evaluation_fraction
    )
    trained = RandomPatches(Volumes(train, code, window, kept_volumes), size, patches, foreground_share, flips=flips)
    return Splits(
        train=trained,
        evaluation=Tiles(Volumes(evaluation, code, window, kept_volumes), size),
        classes=code.classes,
        reads_files=True,
        notes=tuple(notes),
        foreground_of=trained.foreground_of if code.is_binary else None,
    )


def volumes_task(classes: Sequence[str], *, window: Sequence[float] | None = None) -> Task:
    """What a trained model makes of a volume as a whole: the share of each class, and its middle slice in colour."""

    def read(path: Path) -> torch.Tensor:
        return torch.from_numpy(normalised(read_volume(path), window))[None]

    def tell(outputs: torch.Tensor) -> Answer:
        return {"areas": areas(class_map(outputs), classes)}

    def picture(path: Path, outputs: torch.Tensor) -> Image.Image:
        values, found = read(path)[0], class_map(outputs)
        middle = len(found) // 2
        piece = values[middle]
        bright = (piece - piece.min()) / (piece.max() - piece.min()).clamp(min=1e-12) * 255
        image = Image.fromarray(bright.round().to(torch.uint8).numpy()).convert("RGB")
        return blended(image, found[middle], is_binary=len(classes) == 1)

    return Task(reads="a volume (NIfTI or NumPy)", read=read, tell=tell, picture=picture)


def _size(given: int | Sequence[int]) -> Size:
    sides = (given,) * 3 if isinstance(given, int) else tuple(given)
    if len(sides) != 3 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise DataError(
            f"data.options.patch_size is {given}", rule="voxels of a side, or of three sides", do="patch_size: 64"
        )
    return sides[0], sides[1], sides[2]


def _require_options(patches: int, share: float, window: Sequence[float] | None, kept: int) -> None:
    for holds, value, rule in (
        (patches >= 1, f"patches is {patches}", "at least one patch a volume"),
        (0 <= share <= 1, f"foreground_share is {share}", "between 0 and 1"),
        (
            window is None or (len(window) == 2 and window[0] < window[1]),
            f"window is {window}",
            "[least, most], or null",
        ),
        (kept >= 0, f"kept_volumes is {kept}", "0 or more"),
    ):
        if not holds:
            raise DataError(f"data.options.{value}", rule=rule, do="correct it")
