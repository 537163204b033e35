"""Equal random bytes on all ranks, where a script asks the operating system for them: generators without a seed.

`uuid` calls `os.urandom`; `SystemRandom`, `secrets` and NumPy's `SeedSequence` call the name of it
in `random`. C code is behind `Random.seed` and `torch.seed`, which are replaced, and behind
`torch.Generator.seed`, which cannot be: the in-step hash finds the difference.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy
import torch

from samestep.script.replaced import replaced
from samestep.view.in_step import Line, script_line

_BLOCK = 64  # bytes of one hash
# Names of files, sockets and semaphores, and keys of connections, differ between processes.
_OWN_BYTES = ("tempfile", "multiprocessing")
_SEEDING = "samestep.distributed.rng"  # seeds for samples, and restores
_PASSED = (
    "random",
    "secrets",
    "uuid",
    __name__,
)  # modules between a caller and the operating system


class EqualBytes:
    """Random bytes of the main thread of this process; other threads and forked children have their own.

    The n-th draw of a line of a library on behalf of a line of the script is a function of the
    seed, the lines and n. Draws in code of one rank only thus leave the draws of other lines equal.

    Args:
        seed: at least 16 bytes, equal on all ranks and not known to others, as the bytes may become
            secrets.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = hashlib.blake2b(seed).digest()
        self._draws: Counter[str] = Counter()
        self._owner = os.getpid(), threading.get_ident()
        self._urandom = os.urandom

    def __call__(self, size: int) -> bytes:
        """Return `size` bytes, in place of `os.urandom`."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _PASSED:
            frame = frame.f_back
        module = str(frame.f_globals.get("__name__")) if frame is not None else ""
        is_owner = (os.getpid(), threading.get_ident()) == self._owner
        if size < 0 or frame is None or not is_owner or module.split(".")[0] in _OWN_BYTES:
            return self._urandom(size)
        place = f"{script_line(frame)} {module}:{frame.f_lineno}"
        self._draws[place] += 1
        message = f"{place} {self._draws[place]}"
        blocks = (
            hashlib.blake2b(f"{message} {number}".encode(), key=self._key).digest()
            for number in range(-(-size // _BLOCK))
        )
        return b"".join(blocks)[:size]

    def number(self) -> int:
        """Return a number of 64 bits."""
        return int.from_bytes(self(8), "little")


@contextmanager
def equal_entropy(seed: bytes, seeds: MutableMapping[str, tuple[Line, str]]) -> Iterator[None]:
    """Give equal bytes to all code of the main thread that asks for random ones, inside the block.

    Args:
        seed: as of `EqualBytes`.
        seeds: receives the line and the text of the last seed of each function that seeds a global
            generator.
    """
    draw = EqualBytes(seed)
    seed_random = random.Random.seed
    manual_seed = torch.manual_seed

    def seed_of_random(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed_random(self, int.from_bytes(draw(32), "little") if a is None else a, version)

    def seed_of_torch() -> int:
        value = draw.number()
        manual_seed(value)
        return value

    def uuid1(node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
        return uuid.UUID(bytes=draw(16), version=1)  # the time would differ

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            value = next(iter((*arguments, *options.values())), None)
            caller = sys._getframe(1)
            if value is not None and caller.f_globals.get("__name__") != _SEEDING:
                seeds[name] = script_line(caller), repr(value)[:40]
            return function(*arguments, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(os, urandom=draw))
        stack.enter_context(replaced(uuid, uuid1=uuid1))
        stack.enter_context(replaced(random.Random, seed=seed_of_random))
        python_seed = recorded("random.seed", random._inst.seed)
        stack.enter_context(replaced(random, _urandom=draw, seed=python_seed))
        stack.enter_context(
            replaced(numpy.random, seed=recorded("numpy.random.seed", numpy.random.seed))
        )
        torch_seed = recorded("torch.manual_seed", manual_seed)
        for module in (torch, torch.random):
            stack.enter_context(replaced(module, seed=seed_of_torch, manual_seed=torch_seed))
        yield
