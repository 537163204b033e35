"""Generators around reads of samples: seeded by (seed, epoch, sample), watched, preserved."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from samestep.data.read_state import GENERATORS, objects_of
from samestep.distributed.rng import derive_seed, seed_generators

_MIX = 0x9E3779B97F4A7C15  # odd: seeds of several generators of one data set differ
# The generators behind the functions of the modules.
_OF_PROCESS = (
    torch.default_generator,
    random.random.__self__,  # type: ignore[attr-defined]
    numpy.random.mtrand._rand,
)


class WatchedGenerators:
    """Global generators around reads that draw nothing, and whether they did.

    For each batch, so the states are read from memory where possible: NumPy needs 60 microseconds
    to get and set a state, Python 15.
    """

    def __init__(self) -> None:
        self._bits = numpy.random.MT19937(0)
        self._address = self._bits.ctypes.state_address

    def __enter__(self) -> None:
        """Note the states; they are restored at the end of the block."""
        self._python = _python_words()
        self._torch = torch.get_rng_state()
        self._numpy = ctypes.string_at(self._address, _STATE_BYTES)
        self._script = get_bit_generator()
        # With the second Gaussian number, which the change of the bits drops.
        self._script_state = numpy.random.get_state(legacy=False)
        # Draws change these bits, and not those of the script.
        set_bit_generator(self._bits)
        self._has_drawn: bool | None = None

    def __exit__(self, *error: object) -> None:
        if self._has_drawn is None:
            self.have_drawn()
        if self._has_drawn:
            index, *words = struct.unpack("i624I", self._python[0])
            random.setstate((random.Random.VERSION, (*words, index), self._python[1]))
            torch.set_rng_state(self._torch)
            numpy.random.seed(0)  # a second Gaussian number is kept outside of the bits
        set_bit_generator(self._script)
        if self._script_state["has_gauss"]:
            numpy.random.set_state(self._script_state)

    def have_drawn(self) -> bool:
        """Whether a generator has been used in the block; called at its end."""
        torch_state = torch.get_rng_state()
        self._has_drawn = (
            _python_words() != self._python
            or ctypes.string_at(self._address, _STATE_BYTES) != self._numpy
            or torch_state.numpy().tobytes() != self._torch.numpy().tobytes()
        )
        return self._has_drawn


def _python_words() -> tuple[bytes, float | None]:
    """Return position and words of the generator of `random`, and its second Gaussian number."""
    # The instance behind the functions of the module.
    generator = random.random.__self__  # type: ignore[attr-defined]
    if _HAS_WORDS_IN_MEMORY:
        words_in_memory = ctypes.string_at(id(generator) + object.__basicsize__, _STATE_BYTES)
        return words_in_memory, generator.gauss_next
    _, (*words, position), second = random.getstate()
    return struct.pack("i624I", position, *words), second


def _has_words_in_memory() -> bool:
    """Whether this interpreter has position and words after the head of the object, as CPython."""
    head_bytes = 2 * ctypes.sizeof(ctypes.c_void_p)
    if sys.implementation.name != "cpython" or object.__basicsize__ != head_bytes:
        return False
    generator = random.Random(5)
    generator.random()
    _, (*words, position), _ = generator.getstate()
    found = ctypes.string_at(id(generator) + head_bytes, _STATE_BYTES)
    return found == struct.pack("i624I", position, *words)


_STATE_BYTES = 4 * 625  # of a Mersenne Twister: 624 words and a position
_HAS_WORDS_IN_MEMORY = _has_words_in_memory()


def sample_number(index: Any) -> int:
    """Return an index as a number for seeds from 0 to 2**64 - 1, equal in all processes."""
    try:
        return operator.index(index) % 2**64
    except TypeError:
        text = repr(index).encode(errors="surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class OwnGenerators:
    """Generators that a data set, its transforms or its collate function own."""

    def __init__(self, *roots: Any) -> None:
        of_process = set(map(id, _OF_PROCESS))
        self._all = [
            value
            for value in objects_of(*roots)
            if isinstance(value, GENERATORS) and id(value) not in of_process
        ]

    def __bool__(self) -> bool:
        return bool(self._all)

    def are(self, others: OwnGenerators) -> bool:
        """Whether both are the same objects."""
        return list(map(id, self._all)) == list(map(id, others._all))

    def states(self) -> list[str]:
        """Return their states, to be compared."""
        states = []
        for generator in self._all:
            state = _state(generator)
            if isinstance(state, torch.Tensor):
                state = state.numpy().tobytes()  # a tensor's text is an abbreviation
            states.append(repr(state))
        return states

    def seed(
        self, purpose: Literal["sample", "collate"], seed: int, epoch: int, index: Any, repeat: int
    ) -> None:
        """Seed the generators of this process, and these, by (seed, epoch, sample).

        Args:
            purpose: what draws: the sample, or the collation of a batch.
            seed: seed of the loader.
            epoch: number of the epoch.
            index: index of the sample, or of the first of a batch.
            repeat: earlier occurrences of the index in the epoch.
        """
        facts = [epoch, sample_number(index)]
        # A first occurrence has the seed of a sampler that draws each index once.
        if repeat:
            facts.append(repeat)
        seed = derive_seed(purpose, seed, *facts)
        seed_generators(seed)
        for number, generator in enumerate(self._all, start=1):
            _seed(generator, (seed + number * _MIX) % 2**64)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore their states at the end of the block: the script may use them as well."""
        states = [_state(generator) for generator in self._all]
        try:
            yield
        finally:
            for generator, state in zip(self._all, states, strict=True):
                _set_state(generator, state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        # Bit generators have no method for a new seed.
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(seed % 2**32)  # at most 32 bits
    else:
        generator.seed(seed)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
