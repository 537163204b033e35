"""What user code asks of torch.distributed is heard, described and done, and forgotten at the end."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.runtime import collectives
from samestep.runtime.call_site import call_site
from samestep.runtime.collectives import hear_collectives

Heard = list[tuple[str, bool]]


@pytest.fixture
def heard(alone: samestep.World) -> Iterator[Heard]:
    found: Heard = []
    restore = hear_collectives(lambda: True, lambda what, waits: found.append((what, waits)))
    yield found
    restore()


def test_collectives_are_described_by_what_ranks_share(heard: Heard) -> None:
    three, parts = torch.ones(3), [torch.zeros(3)]
    dist.all_reduce(three)
    dist.all_reduce(three.double(), op=dist.ReduceOp.MAX)
    dist.broadcast(three.long(), 0)
    dist.reduce(three, dst=0)
    dist.all_gather(parts, three)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
        dist.all_gather_into_tensor(torch.zeros(3), three)
    dist.gather(three, parts)
    dist.scatter(three, parts, src=0)
    dist.barrier()
    assert heard == [
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


def test_what_is_not_waited_for_is_told_apart(heard: Heard) -> None:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert heard == [("all_reduce (sum) of 1 float32", False)]


def test_subgroups_are_not_heard_but_their_making_is(heard: Heard) -> None:
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    assert [what for what, _ in heard] == ["new_group", "all_reduce (sum) of 1 float32"]


def test_what_a_world_is_asked_for_is_heard(heard: Heard, alone: samestep.World) -> None:
    alone.barrier()
    assert heard == [("barrier", True)]


def test_a_wrong_call_says_what_it_said_before(heard: Heard) -> None:
    with pytest.raises(TypeError, match="tensor"):
        dist.all_reduce()
    assert heard == []


def test_functions_are_put_back(alone: samestep.World) -> None:
    before = {name: getattr(dist, name) for name in collectives._HEARD}
    heard: Heard = []
    restore = hear_collectives(lambda: False, lambda what, waits: heard.append((what, waits)))
    assert all(getattr(dist, name) is not function for name, function in before.items())
    dist.barrier()
    restore()
    dist.barrier()
    assert heard == []
    assert all(getattr(dist, name) is function for name, function in before.items())


def test_call_sites_are_lines_of_this_file() -> None:
    file, _, line = call_site().rpartition(":")
    assert file.endswith("test_collectives.py")
    assert int(line) > 1


def test_a_call_from_our_own_code_names_it() -> None:
    source = "def ask():\n    return call_site()\n"
    inside: dict[str, object] = {"call_site": call_site}
    exec(compile(source, samestep.__file__.replace("__init__", "trainer"), "exec"), inside)
    assert "test_collectives.py:" in str(inside["ask"]())  # type: ignore[operator]


def test_the_end_of_a_collective_is_heard_too(alone: samestep.World) -> None:
    told: list[str] = []

    def hear(what: str, waits: bool) -> Callable[[], None]:
        told.append(f"begin {what}")
        return lambda: told.append("end")

    restore = hear_collectives(lambda: True, hear)
    try:
        dist.barrier()
        with pytest.raises(RuntimeError, match="root"):
            dist.broadcast(torch.ones(1), 7)
    finally:
        restore()
    assert told == ["begin barrier", "end", "begin broadcast of 1 float32 from rank 7", "end"]
