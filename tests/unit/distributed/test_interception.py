"""Interception of `torch.distributed` collectives, and call sites."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from samestep.distributed import interception
from samestep.distributed.interception import call_site, intercept_collectives
from samestep.distributed.world import World

Calls = list[bool]


@pytest.fixture
def calls(alone: World) -> Iterator[Calls]:
    calls: Calls = []
    restore = intercept_collectives(lambda: True, calls.append)
    yield calls
    restore()


def test_collectives_of_all_ranks_are_intercepted(calls: Calls, alone: World) -> None:
    dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    dist.all_reduce(torch.ones(3), group=dist.group.WORLD)
    alone.barrier()
    assert calls == [True, True]


def test_functions_are_restored(alone: World) -> None:
    originals = {name: getattr(dist, name) for name in interception._COLLECTIVES}
    calls: Calls = []
    restore = intercept_collectives(lambda: False, calls.append)
    assert all(getattr(dist, name) is not function for name, function in originals.items())
    dist.barrier()
    restore()
    dist.barrier()
    assert calls == []
    assert all(getattr(dist, name) is function for name, function in originals.items())


def test_call_site_is_a_line_of_this_file() -> None:
    file, _, line = call_site().rpartition(":")
    assert file.endswith("test_interception.py")
    assert int(line) > 1


def test_returned_function_is_called_at_the_end(alone: World) -> None:
    events: list[str] = []

    def on_collective(is_blocking: bool) -> Callable[[], None]:
        events.append("begin")
        return lambda: events.append("end")

    restore = intercept_collectives(lambda: True, on_collective)
    try:
        dist.barrier()
        with pytest.raises(RuntimeError, match="root"):
            dist.broadcast(torch.ones(1), 7)
    finally:
        restore()
    assert events == ["begin", "end", "begin", "end"]
