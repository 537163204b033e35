"""State of the observers of one process, and the rule that an observer never changes a run."""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from samestep.distributed.env import read_rank_place
from samestep.errors import InputError
from samestep.tools.audit.events import EventWriter


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


class Session:
    """Shared state of the observers; each of them replaces a few functions of torch."""

    def __init__(self, writer: EventWriter) -> None:
        self.writer = writer
        self._group: Any = None
        self._has_launcher = False  # an event of this process has it
        self._failures = 0
        self.steps = 0  # steps of all optimizers
        self.optimizer: int | None = None  # number of the optimizer of the last step

    def emit(self, kind: str, **values: Any) -> None:
        """Write an event with the number of steps, and the world if it is new."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not None and group is not self._group:
            self._group = group
            # The first rank writes the name of the world to the store of its process group.
            store = distributed_c10d._get_default_store()
            identifier = store.compare_set("samestep-audit", "", uuid.uuid4().hex).decode()
            self.writer.set_world(identifier, dist.get_rank(), dist.get_world_size())
        elif group is None and kind == "update" and not self._has_launcher:
            # Not at an earlier event: the script can still create a group.
            self._has_launcher = True
            self._write_launcher()
        self.writer.write(kind, step=self.steps, **values)

    def _write_launcher(self) -> None:
        """Write the place among the ranks of the launcher, which has no process group."""
        try:
            place = read_rank_place()
        except InputError:  # not the variables of a rank
            return
        if place is not None:
            job = f"{place.address}:{place.port}"
            # Of this machine: processes of other machines write no events here.
            size = place.local_size or place.world_size
            self.writer.write("launched", job=job, rank=place.local_rank, size=size)

    def guarded(self, observe: Callable[..., None]) -> Callable[..., None]:
        """Return `observe` with the first of its exceptions written as an event."""

        @functools.wraps(observe)
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                observe(*args, **kwargs)
            except Exception as error:  # boundary: a failure of an observer must not change the run
                self._failures += 1
                if self._failures == 1:
                    text = f"{type(error).__name__}: {error}"
                    with suppress(OSError):  # the audit has ended and removed its folder
                        self.writer.write("failure", observer=observe.__qualname__, error=text)

        return call

    def observe(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] = _ignore,
        after: Callable[..., None] = _ignore,
    ) -> None:
        """Replace a function by one that also calls `before(*args)` and `after(result, *args)`."""
        original = getattr(owner, name)
        begin = self.guarded(before)
        end = self.guarded(after)

        def observed(*args: Any, **kwargs: Any) -> Any:
            begin(*args, **kwargs)
            result = original(*args, **kwargs)
            end(result, *args, **kwargs)
            return result

        setattr(owner, name, observed)


def sample_numbers(index: Any) -> list[int] | None:
    """Return the indices of a batch, or None if a sampler yields other keys."""
    indices = index if isinstance(index, list | tuple) else [index]
    try:
        # Not `int`, which also converts floats and texts.
        return list(map(operator.index, indices))
    except TypeError:
        return None
