"""Interception of `torch.distributed` collectives, and call sites."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.distributed import interception
from samestep.distributed.interception import call_site, intercept_collectives

Calls = list[tuple[str, bool]]


@pytest.fixture
def calls(alone: samestep.World) -> Iterator[Calls]:
    calls: Calls = []
    restore = intercept_collectives(lambda: True, lambda description, blocking: calls.append((description, blocking)))
    yield calls
    restore()


def test_descriptions_have_the_common_properties(calls: Calls) -> None:
    three, parts = torch.ones(3), [torch.zeros(3)]
    dist.all_reduce(three)
    dist.all_reduce(three.double(), op=dist.ReduceOp.MAX)
    dist.broadcast(three.long(), 0)
    dist.reduce(three, dst=0)
    dist.all_gather(parts, three)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated in torch 2.13
        dist.all_gather_into_tensor(torch.zeros(3), three)
    dist.gather(three, parts)
    dist.scatter(three, parts, src=0)
    dist.barrier()
    assert calls == [
        ("all_reduce (sum) of 3 float32", True),
        ("all_reduce (max) of 3 float64", True),
        ("broadcast of 3 int64 from rank 0", True),
        ("reduce (sum) of 3 float32 to rank 0", True),
        ("all_gather of float32", True),
        ("all_gather_into_tensor of 3 float32", True),
        ("gather of float32 to rank 0", True),
        ("scatter of float32 from rank 0", True),
        ("barrier", True),
    ]


def test_subgroups_are_ignored_but_not_their_creation(calls: Calls) -> None:
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    assert [description for description, _ in calls] == ["new_group", "all_reduce (sum) of 1 float32"]


def test_collectives_of_a_world_are_intercepted(calls: Calls, alone: samestep.World) -> None:
    alone.barrier()
    assert calls == [("barrier", True)]


def test_functions_are_restored(alone: samestep.World) -> None:
    originals = {name: getattr(dist, name) for name in interception._COLLECTIVES}
    calls: Calls = []
    restore = intercept_collectives(lambda: False, lambda description, blocking: calls.append((description, blocking)))
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


def test_returned_function_is_called_at_the_end(alone: samestep.World) -> None:
    events: list[str] = []

    def on_collective(description: str, is_blocking: bool) -> Callable[[], None]:
        events.append(f"begin {description}")
        return lambda: events.append("end")

    restore = intercept_collectives(lambda: True, on_collective)
    try:
        dist.barrier()
        with pytest.raises(RuntimeError, match="root"):
            dist.broadcast(torch.ones(1), 7)
    finally:
        restore()
    assert events == ["begin barrier", "end", "begin broadcast of 1 float32 from rank 7", "end"]
