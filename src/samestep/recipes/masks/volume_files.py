"""Volumes and their masks as NIfTI or NumPy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from samestep.errors import DataError
from samestep.recipes.masks.code import MaskCode, Numbers
from samestep.recipes.masks.pairs import Pair
from samestep.recipes.reading import reading

ENDINGS = (".nii.gz", ".nii", ".npy", ".npz")
Voxels = NDArray[numpy.float32]


def read_volume(path: Path) -> Voxels:
    """Values `(D, H, W)` of a volume, in the order of its file's axes.

    Raises:
        DataError: it is not there, is cut off, is no volume, or has values that are not finite.
        RunError: the disk or the network failed.
    """
    with reading(path, "a volume"):
        values = _array(path).astype(numpy.float32)
    strange = values.size - int(numpy.isfinite(values).sum())
    if strange:
        raise DataError(
            f"{path} has {strange} values that are not finite numbers",
            rule="every value of a volume is a number",
            do="mend or remove the volume, then resume; or leave such out: data.bad_samples: skip",
        )
    return values


def read_volume_mask(path: Path, code: MaskCode) -> Numbers:
    """Class numbers `(D, H, W)` of a mask.

    Raises:
        DataError: it is not there, is cut off, is no volume, or has values that mean nothing.
        RunError: the disk or the network failed.
    """
    with reading(path, "a mask"):
        values = _array(path)
        whole = values.astype(numpy.int64)
        if not numpy.array_equal(whole, values):
            raise ValueError("it has values that are not whole numbers")
    return code.numbers(whole, str(path))


def read_pair(pair: Pair, code: MaskCode) -> tuple[Voxels, Numbers]:
    """A volume and its mask.

    Raises:
        DataError: one of them cannot be used, or they differ in size.
    """
    volume, mask = read_volume(pair.image), read_volume_mask(pair.mask, code)
    if volume.shape != mask.shape:
        raise DataError(
            f"{pair.mask} has the shape {mask.shape}, {pair.image} {volume.shape}",
            rule="a mask has the shape of its volume",
            do="mend the pair, then resume; or leave such out: data.bad_samples: skip",
        )
    return volume, mask


def shape_of(path: Path) -> tuple[int, int, int]:
    """The shape of a volume from the head of its file, where that is enough.

    Raises:
        DataError: it is not there, or is no volume.
        RunError: the disk or the network failed.
    """
    with reading(path, "a volume"):
        if path.name.lower().endswith((".nii", ".nii.gz")):
            return _three_sides(_nifti(path).shape)
        return _three_sides(_array(path, is_mapped=True).shape)


def _array(path: Path, *, is_mapped: bool = False) -> NDArray[Any]:
    if path.name.lower().endswith((".nii", ".nii.gz")):
        values = numpy.asarray(_nifti(path).dataobj)
    else:
        found = numpy.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
        if isinstance(found, numpy.lib.npyio.NpzFile):
            with found:
                if len(found.files) != 1:
                    raise ValueError(f"it holds {len(found.files)} arrays, and one is wanted")
                values = found[found.files[0]]
        else:
            values = found
    if values.dtype.kind not in "buif":
        raise ValueError(f"its values are of the kind {values.dtype}; those of a volume are numbers")
    _three_sides(values.shape)
    return values


def _nifti(path: Path) -> Any:
    try:
        import nibabel
    except ImportError as error:
        raise DataError(
            f"{path}: nibabel cannot be imported: {error}",
            rule="NIfTI files are read by nibabel",
            do="pip install 'samestep[zoo]', or NumPy files",
        ) from error
    return nibabel.load(path)


def _three_sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"it has the shape {shape}, and a volume has three sides")
    return shape[0], shape[1], shape[2]
