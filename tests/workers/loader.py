"""Rank functions for `unit/data/test_loader.py`."""

import os
from typing import Any

import torch.distributed as dist

import samestep
from helpers.drawing_datasets import Draws, Faulty, jittered
from samestep.data.loader import Loader
from samestep.errors import DataError
from samestep.microbatches import Cursor

Seen = dict[int, list[float]]


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def draws_of(loader: Loader) -> Seen:
    """Return the random draws of each sample of one epoch, by index, in the order of this rank."""
    return {
        int(index): drawn.tolist()
        for batch in loader
        for microbatch in batch.local_microbatches
        for index, drawn in zip(*microbatch.data, strict=True)
    }


def passes(workers: int) -> list[list[Seen]]:
    """Return by rank: two epochs, the start of an interrupted one, its rest, and a repeated epoch."""
    with samestep.start(device="cpu") as world:
        loader = Loader(
            Draws(37),
            batch_size=16,
            microbatches=5,
            world=world,
            seed=3,
            shuffle=True,
            num_workers=workers,
            collate_fn=jittered,
        )
        seen = [draws_of(loader)]
        loader.cursor = Cursor(1, 0)
        seen.append(draws_of(loader))
        loader.cursor = Cursor(2, 0)
        first = next(iter(loader))
        loader.end_step(first)
        seen.append({int(i): [] for microbatch in first.local_microbatches for i in microbatch.data[0]})
        seen.append(draws_of(loader))
        loader.cursor = Cursor(1, 0)
        seen.append(draws_of(loader))
        return gathered(seen)


def failure(workers: int, error: str) -> tuple[str, str]:
    """Return type and text of the error that the loader raises for an unreadable sample."""
    with samestep.start(device="cpu") as world:
        loader = Loader(Faulty(16, 11, error), batch_size=8, microbatches=4, world=world, num_workers=workers)
        batches = iter(loader)
        assert [microbatch.data.tolist() for microbatch in next(batches).local_microbatches] == [
            [0, 1],
            [2, 3],
            [4, 5],
            [6, 7],
        ]
        try:
            next(batches)
        except (DataError, ValueError) as raised:
            return type(raised).__name__, str(raised)
        return "", ""


class ProcessIds:
    """Dataset whose samples are the id of the loading process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int, /) -> int:
        return os.getpid()


def fail_with_workers_alive() -> None:
    """Fail with a message that lists the workers of the loader."""
    with samestep.start(device="cpu") as world:
        loader = Loader(ProcessIds(), batch_size=8, microbatches=8, world=world, num_workers=2, persistent_workers=True)
        workers = {int(process) for batch in loader for m in batch.local_microbatches for process in m.data}
        raise RuntimeError(f"workers: {' '.join(str(process) for process in workers)}")


def end_with_workers_alive() -> int:
    """Keep a reference to a loader with workers beyond the end of the function."""
    with samestep.start(device="cpu") as world:
        loader = Loader(ProcessIds(), batch_size=8, microbatches=8, world=world, num_workers=2, persistent_workers=True)
        _loaders.append(loader)
        return sum(batch.size for batch in loader)


_loaders: list[Loader] = []
