"""Cheap hashes of values of tensors and of states of generators, equal in all processes, and lines of the script."""

from __future__ import annotations

import ctypes
import os
import random
import sysconfig
import zlib
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn

_SAMPLE = 32  # values of a tensor that are compared
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
Line = tuple[str, int]  # file and number


def sample_of(tensor: Tensor, most: int = _SAMPLE) -> Tensor | None:
    """Return up to `most` values in one dimension; None for tensors without plain memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    count = tensor.numel()
    if (
        not is_plain
        or not count
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_meta
    ):
        return None
    tensor = tensor.detach()
    span = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
    )
    if span != count:  # expanded, or a part of other memory
        tensor = tensor[
            tuple(slice(None, None, max(1, size // 3)) for size in tensor.shape)
        ].contiguous()
        count = tensor.numel()
    step = max(1, (count - 1) // (most - 1))
    return tensor.as_strided(((count - 1) // step + 1,), (step,), tensor.storage_offset()).clone()


def hash_of(sample: Tensor) -> int:
    """Hash the bits of a result of `sample_of` on a CPU."""
    return zlib.crc32(sample.view(torch.uint8).numpy().data)


def torch_generator() -> int:
    """Hash the CPU generator: seed, position, first words and cached normals, which differ after any draw."""
    state = torch.default_generator.get_state().numpy().data
    return zlib.crc32(state[-64:], zlib.crc32(state[:64]))


def numpy_generator() -> int:
    """Hash the global generator of NumPy."""
    generator = get_bit_generator()  # `get_state` copies for 80 microseconds
    if type(generator).__name__ != "MT19937":
        return zlib.crc32(repr(generator.state).encode())
    return zlib.crc32(
        ctypes.string_at(generator.ctypes.state_address, 4 * 625)
    )  # 624 words and the position


@cache
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, to an installed library or to this package."""
    if name.startswith("<frozen") or "site-packages" in name or "dist-packages" in name:
        return True
    return name.startswith((_STANDARD_LIBRARY + os.sep, _PACKAGE + os.sep))


def script_line(frame: FrameType | None) -> Line:
    """Return the innermost line that is in no installed package, or the outermost line."""
    line = ("", 0)
    while frame is not None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if not line[0].startswith("<") and not is_library_file(line[0]):
            break
        frame = frame.f_back
    return line


def python_generator() -> int:
    """Hash the generator of `random`."""
    _, words, normal = random.getstate()
    return hash((words, zlib.crc32(repr(normal).encode())))
