"""What ranks run for `unit/data/test_loader.py`."""

import os
from typing import Any

import torch.distributed as dist

import samestep
from drawing_datasets import Draws, Faulty, jittered
from samestep.cursor import Cursor
from samestep.data.loader import Loader
from samestep.errors import DataError

Seen = dict[int, list[float]]


def gathered(value: Any) -> list[Any]:
    """What every rank has, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def draws_of(loader: Loader) -> Seen:
    """What each sample of a pass looked like, by index, in the order of this rank."""
    return {
        int(index): drawn.tolist()
        for batch in loader
        for part in batch.parts
        for index, drawn in zip(*part.data, strict=True)
    }


def passes(workers: int) -> list[list[Seen]]:
    """By rank: two whole passes, one that is left in its middle, its rest, and the pass after that."""
    with samestep.start(device="cpu") as world:
        loader = Loader(
            Draws(37),
            batch_size=16,
            shards=5,
            world=world,
            seed=3,
            shuffle=True,
            workers=workers,
            collate=jittered,
        )
        seen = [draws_of(loader), draws_of(loader)]
        batches = iter(loader)
        first = next(batches)
        seen.append({int(i): [] for part in first.parts for i in part.data[0]})
        seen.append(draws_of(loader))
        loader.cursor = Cursor(1, 0)
        seen.append(draws_of(loader))
        return gathered(seen)


def failure(workers: int, error: str) -> tuple[str, str]:
    """Type and text of what the loader raises where a sample cannot be read."""
    with samestep.start(device="cpu") as world:
        loader = Loader(Faulty(16, 11, error), batch_size=8, shards=4, world=world, workers=workers)
        batches = iter(loader)
        assert [part.data.tolist() for part in next(batches).parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        try:
            next(batches)
        except (DataError, ValueError) as raised:
            return type(raised).__name__, str(raised)
        return "", ""


class Whereabouts:
    """Sample `i` is the process that makes it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int, /) -> int:
        return os.getpid()


def fail_with_workers_alive() -> None:
    """Fail with a message that lists the loader's workers."""
    with samestep.start(device="cpu") as world:
        loader = Loader(Whereabouts(), batch_size=8, shards=8, world=world, workers=2)
        workers = {int(process) for batch in loader for part in batch.parts for process in part.data}
        raise RuntimeError(f"workers: {' '.join(str(process) for process in workers)}")


def end_with_workers_alive() -> int:
    """Keep a loader with workers beyond the end of the function."""
    with samestep.start(device="cpu") as world:
        loader = Loader(Whereabouts(), batch_size=8, shards=8, world=world, workers=2)
        _kept.append(loader)
        return sum(batch.size for batch in loader)


_kept: list[Loader] = []
