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

# 624 numbers and a position (Mersenne Twister), and the second of two Gaussian numbers if it was
# not drawn yet.
_PYTHON_STATE = "<625I?d"
# Room for a state of NumPy as JSON: its generators have states of several forms, of which the 624
# numbers are the longest.
_NUMPY_BYTES = 8192
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
    else:  # a script has installed another kind, which `numpy.random.seed` refuses
        set_bit_generator(type(bits)(seed))
    torch.random.default_generator.manual_seed(seed)
    if is_accelerator(device):
        accelerator_module().manual_seed(seed)


def generator_state(device: torch.device | None = None) -> tuple[object, ...]:
    """Return the states of the generators of this process and of a GPU, to compare them."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(accelerator_module().get_rng_state(device))
    state = numpy.random.get_state(legacy=False)
    normal = state["has_gauss"], state["gauss"]
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
        PassedGenerator(_python_state, _set_python_state),
        PassedGenerator(_numpy_state, _set_numpy_state),
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


def _python_state() -> torch.Tensor:
    _, numbers, second = random.getstate()
    packed = struct.pack(_PYTHON_STATE, *numbers, second is not None, second or 0.0)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _set_python_state(state: torch.Tensor) -> None:
    *numbers, has_second, second = struct.unpack(_PYTHON_STATE, _bytes(state))
    random.setstate((random.Random.VERSION, tuple(numbers), second if has_second else None))


def _numpy_state() -> torch.Tensor:
    state = numpy.random.get_state(legacy=False)
    text = json.dumps(state, default=numpy.ndarray.tolist).encode().ljust(_NUMPY_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _set_numpy_state(state: torch.Tensor) -> None:
    numpy.random.set_state(json.loads(_bytes(state)))


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
