"""Random bytes that are equal on all ranks, for scripts without seeds.

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

from samestep.distributed.collective_check import Line, script_line
from samestep.script.patches import replaced

# Names of files, sockets and semaphores, and keys of connections, differ between processes.
_OWN_BYTES = ("tempfile", "multiprocessing")
_SEEDING = "samestep.distributed.rng"  # seeds for samples, and restores
# Modules between a caller and the operating system.
_PASSED = ("random", "secrets", "uuid", __name__)


class EqualBytes:
    """Random bytes of the main thread of this process; other threads and children have their own.

    The n-th draw of a line of a library on behalf of a line of the script is a function of the
    seed, the lines and n. Draws in code of one rank only thus leave the draws of other lines equal.

    Args:
        seed: at least 16 bytes, equal on all ranks and not known to others, as the bytes may become
            secrets.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.sha256(seed).digest()  # of one length, whatever follows
        self._draws: Counter[str] = Counter()
        self._owner = os.getpid(), threading.get_ident()
        self._urandom = os.urandom

    def __call__(self, size: int) -> bytes:
        """Return `size` bytes, in place of `os.urandom`."""
        # By lines, not by one counter: ranks may draw in different order, as rank 0 does in code
        # of its own.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _PASSED:
            frame = frame.f_back
        is_owner = (os.getpid(), threading.get_ident()) == self._owner
        if size < 0 or frame is None or not is_owner:
            return self._urandom(size)
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in _OWN_BYTES:
            return self._urandom(size)
        place = f"{script_line(frame)} {module}:{frame.f_lineno}"
        self._draws[place] += 1
        message = f"{place} {self._draws[place]}".encode()
        return hashlib.shake_256(self._seed + message).digest(size)


@contextmanager
def equal_entropy(seed: bytes, seeds: MutableMapping[str, tuple[Line, str]]) -> Iterator[None]:
    """Give equal bytes to all code of the main thread that asks for random ones, in the block.

    Args:
        seed: as of `EqualBytes`.
        seeds: receives the line and the text of the last seed of each function that seeds a global
            generator.
    """
    draw = EqualBytes(seed)
    seed_random = random.Random.seed
    manual_seed = torch.manual_seed

    def seed_of_random(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            a = int.from_bytes(draw(32), "little")
        seed_random(self, a, version)

    def seed_of_torch() -> int:
        value = int.from_bytes(draw(8), "little")
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
        # After the class: `random.seed` is a method that was bound before.
        python_seed = recorded("random.seed", random._inst.seed)
        stack.enter_context(replaced(random, _urandom=draw, seed=python_seed))
        numpy_seed = recorded("numpy.random.seed", numpy.random.seed)
        stack.enter_context(replaced(numpy.random, seed=numpy_seed))
        torch_seed = recorded("torch.manual_seed", manual_seed)
        for module in (torch, torch.random):
            stack.enter_context(replaced(module, seed=seed_of_torch, manual_seed=torch_seed))
        yield
