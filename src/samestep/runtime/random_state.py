"""Random states named by what they are for, never by who draws from them.

A state is a hash of a purpose and of global facts (seed, step, shard; seed, epoch, sample). Rank, worker,
device and the number of resumptions are not among them, so no result can depend on those.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy
import torch

Purpose = Literal["order", "sample", "collate", "shard", "evaluation", "model"]


def derive_seed(purpose: Purpose, *facts: int) -> int:
    """A 64-bit seed for `purpose` from non-negative integers, equal on every machine."""
    packed = struct.pack(f"<{len(facts)}Q", *facts)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode().ljust(16, b"\0")).digest()
    return int.from_bytes(digest, "little")


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, and those of `device` if it has its own."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)


class GeneratorStates:
    """The states that Python's, NumPy's and torch's generators, and those of `device`, have when this is made."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._python, self._array, self._cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._on_gpu = torch.cuda.get_rng_state(self._gpu) if self._gpu is not None else None

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self._python)
        numpy.random.set_state(self._array)
        torch.set_rng_state(self._cpu)
        if self._gpu is not None and self._on_gpu is not None:
            torch.cuda.set_rng_state(self._on_gpu, self._gpu)


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Leave the process's generators as they were found.

    What runs inside differs from rank to rank; what draws outside of it must not notice.
    """
    states = GeneratorStates(device)
    try:
        yield
    finally:
        states.restore()
