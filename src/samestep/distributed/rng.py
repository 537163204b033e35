"""Random states from a purpose and global facts: (seed, step, microbatch) or (seed, epoch, sample).

Rank, worker, device and the number of resumptions are not among these facts, so no result depends
on them.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from samestep.distributed.devices import accelerator_module, is_accelerator

# Room for the state of a generator as text: 624 numbers of the Mersenne Twister are the longest.
_STATE_BYTES = 8192
Purpose = Literal["order", "sample", "collate", "shard", "evaluation", "model"]


def derive_seed(purpose: Purpose, *facts: int) -> int:
    """Return a 64-bit seed for `purpose` from non-negative integers, equal on every machine."""
    packed = struct.pack(f"<{len(facts)}Q", *facts)
    digest = hashlib.blake2b(
        packed, digest_size=8, person=purpose.encode().ljust(16, b"\0")
    ).digest()
    return int.from_bytes(digest, "little")


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch, and that of `device` if `device` is a GPU."""
    random.seed(seed)
    bits = get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(seed % 2**32)
    else:  # which a script has installed; `seed` accepts the Mersenne Twister alone
        set_bit_generator(type(bits)(seed))
    torch.random.default_generator.manual_seed(seed)
    if is_accelerator(device):
        accelerator_module().manual_seed(seed)


def generator_state(device: torch.device | None = None) -> tuple[object, ...]:
    """Return the states of the generators of this process and of a GPU, to compare them."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(accelerator_module().get_rng_state(device))
    numbers = numpy.random.get_state(legacy=False)
    normal = numbers["has_gauss"], numbers["gauss"]
    return random.getstate(), numpy_generator(), normal, *map(_bytes, states)


@contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of the process at the end of the block.

    The block may draw different numbers on each rank without an effect on later draws.
    """
    restore = saved_generators(device)
    try:
        yield
    finally:
        restore()


def saved_generators(device: torch.device | None = None) -> Callable[[], None]:
    """Return a function that restores the present states of the generators."""
    bits = get_bit_generator()
    array = numpy.random.get_state(legacy=False)
    python = random.getstate()
    cpu = torch.get_rng_state()
    gpu = None
    if is_accelerator(device):
        gpu = accelerator_module().get_rng_state(device)

    def restore() -> None:
        # Before the state, which fits this class of generators alone.
        set_bit_generator(bits)
        numpy.random.set_state(array)
        random.setstate(python)
        torch.set_rng_state(cpu)
        if gpu is not None:
            accelerator_module().set_rng_state(gpu, device)

    return restore


@dataclass(frozen=True)
class PassedGenerator:
    """A generator with a state that one process passes to another, which continues the sequence."""

    state: Callable[[], torch.Tensor]  # uint8 on the CPU, of one length
    set_state: Callable[[torch.Tensor], None]


def passed_generators(device: torch.device) -> list[PassedGenerator]:
    """Return the generators that `seed_generators` seeds."""
    generators = [
        PassedGenerator(torch.get_rng_state, torch.set_rng_state),
        PassedGenerator(lambda: _text_of(random.getstate()), _set_python_state),
        PassedGenerator(
            lambda: _text_of(numpy.random.get_state(legacy=False)),  # of any kind of generator
            lambda state: numpy.random.set_state(json.loads(_bytes(state))),
        ),
    ]
    if is_accelerator(device):
        state = partial(accelerator_module().get_rng_state, device)
        restore = partial(accelerator_module().set_rng_state, device=device)
        generators.append(PassedGenerator(state, restore))
    return generators


def share_generators(
    device: torch.device, broadcast: Callable[[torch.Tensor], object], *, is_main: bool
) -> None:
    """Give the generators of all ranks the states of rank 0: a script without seeds draws equally.

    Args:
        device: device of this rank.
        broadcast: overwrites a tensor with that of rank 0. A collective.
        is_main: whether this is rank 0.
    """
    for generator in passed_generators(device):
        state = generator.state()
        broadcast(state)
        if not is_main:
            generator.set_state(state)


def _set_python_state(state: torch.Tensor) -> None:
    version, numbers, second = json.loads(_bytes(state))
    random.setstate((version, tuple(numbers), second))


def _text_of(state: object) -> torch.Tensor:
    text = json.dumps(state, default=numpy.ndarray.tolist).encode().ljust(_STATE_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def torch_generator() -> int:
    """Hash parts of the CPU generator that differ after a draw: seed, position, words, normals."""
    state = torch.default_generator.get_state().numpy().data
    return zlib.crc32(state[-64:], zlib.crc32(state[:64]))


def numpy_generator() -> int:
    """Hash the global generator of NumPy."""
    generator = get_bit_generator()  # `get_state` copies for 80 microseconds
    # A script can install another one, with a state of another form.
    if not isinstance(generator, numpy.random.MT19937):
        return zlib.crc32(repr(generator.state).encode())
    # 624 words and the position.
    return zlib.crc32(ctypes.string_at(generator.ctypes.state_address, 4 * 625))


def python_generator() -> int:
    """Hash the generator of `random`."""
    _, words, normal = random.getstate()
    return hash((words, zlib.crc32(repr(normal).encode())))
