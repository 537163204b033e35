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
from numpy.random.mtrand import get_bit_generator, set_bit_generator

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
    seed_device(seed, device)


def seed_device(seed: int, device: torch.device | None = None) -> None:
    """Seed the generator of this thread's GPU, if `device` is one; it has its own."""
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)


def shared_state() -> tuple[object, ...]:
    """Where the generators are that all threads of this process share; equal as long as nobody draws from them."""
    kind, key, *others = numpy.random.get_state(legacy=True)
    return random.getstate(), kind, bytes(memoryview(key)), *others, torch.get_rng_state().numpy().tobytes()  # type: ignore[arg-type]


class OwnGenerators:
    """The generators of one of several pieces of work that take turns, each drawing as if it ran alone.

    One exception: of the pair of Gaussian numbers that NumPy's older functions make at a time, a second one that was
    not drawn by the end of a turn is dropped. Turns end where the work says, so that is the same wherever it runs.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        # Exchanged, not copied: NumPy takes 60 microseconds to tell and set its state.
        self._bits = numpy.random.MT19937(0)
        self._states: _States | None = None

    def begin_turn(self) -> None:
        """Give the process's generators to this work; `preserved_generators` around all turns takes them back."""
        set_bit_generator(self._bits)
        if self._states is not None:
            self._states.restore()

    def end_turn(self) -> None:
        """Remember where this work's generators are."""
        self._states = _States(self._device)


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Leave the process's generators as they were found.

    What runs inside differs from rank to rank; what draws outside of it must not notice.
    """
    bits, array, others = get_bit_generator(), numpy.random.get_state(), _States(device)
    try:
        yield
    finally:
        set_bit_generator(bits)
        numpy.random.set_state(array)
        others.restore()


class _States:
    """The states of Python's and torch's generators, and of those of `device`, when this is made."""

    def __init__(self, device: torch.device | None) -> None:
        self._python, self._cpu = random.getstate(), torch.get_rng_state()
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._on_gpu = torch.cuda.get_rng_state(self._gpu) if self._gpu is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._gpu is not None and self._on_gpu is not None:
            torch.cuda.set_rng_state(self._on_gpu, self._gpu)
