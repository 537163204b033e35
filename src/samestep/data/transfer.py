"""Moving shards to the device that computes them, ahead of need where that can overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from samestep.data.batch import Shard
from samestep.data.tensors import first_device, map_tensors


def move(data: Any, device: torch.device) -> Any:
    """`data` with every tensor in its lists, tuples and mappings on `device`."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def beside_of(data: Any, other: Any) -> Any:
    """`data` where `other` is: what goes together may come from several devices."""
    device = first_device(other)
    return data if device is None or first_device(data) in (None, device) else move(data, device)


def prefetched(shards: Iterator[Shard], device: torch.device) -> Iterator[Shard]:
    """Shards on `device`; on a GPU the next one is copied by a stream of its own while one is computed."""
    if device.type != "cuda":
        yield from shards
        return
    stream = torch.cuda.Stream(device)
    ahead: Shard | None = None
    for shard in shards:
        with torch.cuda.stream(stream):
            copied = move(shard, device)
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(stream)
        _record(copied, torch.cuda.current_stream(device))
        ahead = copied
    if ahead is not None:
        yield ahead


def _record(data: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing memory that `stream` still reads."""
    if isinstance(data, torch.Tensor):
        data.record_stream(stream)
    elif isinstance(data, Mapping):
        for value in data.values():
            _record(value, stream)
    elif isinstance(data, list | tuple):
        for value in data:
            _record(value, stream)
