"""Arrays of three dimensions from NumPy and NIfTI files.

A header of a few bytes can claim an array of any size, and a compressed file can contain one. All claims are compared
with the size of the file before memory is allocated. Functions raise exceptions of many types for invalid files.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from samestep.zoo.options import import_optional

VOLUME_SUFFIXES = (".nii.gz", ".nii", ".npy", ".npz")

_MAX_VOXELS = 2**31
_DEFLATE_RATIO = 1032  # largest ratio of zlib's compression (zlib's technical details)
_MAX_HEADER_BYTES = 2**16  # of an array
_MAX_EXTENSION_BYTES = 2**24  # between the header and the values of a NIfTI file
_MAX_DIRECTORY_BYTES = 2**16  # of an archive, which has one array
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_START, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
# Size of the header of NIfTI-1 and NIfTI-2; format and position of the offset of the values.
_NIFTI = {348: ("f", 108), 540: ("q", 168)}


def read_array(path: Path) -> NDArray[Any]:
    """Return the values of a volume."""
    if _is_nifti(path):
        return numpy.asarray(_open_nifti(path).dataobj)
    read_array_shape(path)
    values = numpy.load(path, allow_pickle=False)
    if isinstance(values, numpy.lib.npyio.NpzFile):
        with values as arrays:
            values = arrays[arrays.files[0]]
    return values  # type: ignore[no-any-return]


def read_array_shape(path: Path) -> tuple[int, ...]:
    """Return the shape of a volume from the header of its file."""
    if _is_nifti(path):
        return _open_nifti(path).shape  # type: ignore[no-any-return]
    size = path.stat().st_size
    with path.open("rb") as file:
        is_archive = file.read(len(_ZIP_START)) == _ZIP_START
        file.seek(0)
        if not is_archive:
            shape, dtype = _read_header(file)
            return _plausible(shape, dtype, size - file.tell())
        _require_small_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) != 1:
                raise ValueError(f"the file contains {len(members)} arrays instead of one")
            if members[0].compress_type not in _ZIP_METHODS:
                raise ValueError("the array is compressed in an unknown way")
            with archive.open(members[0]) as member:
                shape, dtype = _read_header(member)  # type: ignore[arg-type]
        return _plausible(shape, dtype, size, is_compressed=members[0].compress_type == zipfile.ZIP_DEFLATED)


def _is_nifti(path: Path) -> bool:
    return path.name.lower().endswith((".nii", ".nii.gz"))


def _open_nifti(path: Path) -> Any:
    """Return the image of a NIfTI file, whose values are not read yet."""
    is_compressed, size = path.name.lower().endswith(".gz"), path.stat().st_size
    with gzip.open(path) if is_compressed else path.open("rb") as file:
        header = file.read(max(_NIFTI))
    for order in "<>":
        number = struct.unpack_from(f"{order}i", header)[0] if len(header) >= 4 else 0
        if number in _NIFTI and len(header) >= number:
            kind, position = _NIFTI[number]
            offset = struct.unpack_from(order + kind, header, position)[0]
            if not offset <= _MAX_EXTENSION_BYTES:
                raise ValueError(f"the values begin at byte {offset:g}")
    image = import_optional("nibabel", str(path)).load(path)
    _plausible(image.shape, image.get_data_dtype(), size, is_compressed=is_compressed)
    return image


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], numpy.dtype[Any]]:
    """Return shape and type from the header of an array in NumPy's format (numpy.lib.format)."""
    version = numpy.lib.format.read_magic(file)
    start = file.tell()
    if version == (2, 0) and struct.unpack("<I", file.read(4))[0] > _MAX_HEADER_BYTES:
        raise ValueError("the header of the array is too long")
    file.seek(start)
    if version == (1, 0):
        shape, _, dtype = numpy.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = numpy.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of NumPy's format is not one of plain numbers")
    return shape, dtype


def _require_small_directory(file: BinaryIO, size: int) -> None:
    """Require an archive whose list of members is small; an archive of megabytes can list millions of members."""
    file.seek(max(0, size - 2**16 - 22))
    end = file.read()
    position = end.rfind(_ZIP_END)
    if position < 0 or struct.unpack_from("<I", end, position + 12)[0] > _MAX_DIRECTORY_BYTES:
        raise ValueError("the list of the arrays in the file is damaged or too long")
    file.seek(0)


def _plausible(
    shape: tuple[int, ...], dtype: numpy.dtype[Any], stored_bytes: int, *, is_compressed: bool = False
) -> tuple[int, ...]:
    """Return the claimed shape; raise `ValueError` unless it is that of a volume that the file can contain."""
    if dtype.kind not in "buif":
        raise ValueError(f"the values are of type {dtype} instead of numbers")
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"the shape is {shape}; volumes have three dimensions")
    voxels = math.prod(shape)
    if voxels > _MAX_VOXELS:
        raise ValueError(f"the header claims the shape {shape}, more than {_MAX_VOXELS:,} voxels")
    if voxels * dtype.itemsize > stored_bytes * (_DEFLATE_RATIO if is_compressed else 1):
        raise ValueError(f"the header claims the shape {shape}, more than the {stored_bytes:,} bytes of the file")
    return shape
