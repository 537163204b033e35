"""Collectives in the forward of a model, by whatever name: refused in the first call on every number of processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import all_reduce, barrier

import samestep
from helpers.forked_ranks import RankServer, refusal
from samestep.distributed.collective_check import _ENTRIES
from samestep.distributed.world import World
from samestep.parallelize import world_of_process
from samestep.session import start
from samestep.view.view import View

Collective = Callable[[Tensor, World], Any]


class Joined(nn.Module):
    """A linear layer, and what a function does with the mean of its outputs; from a number of calls on."""

    def __init__(self, collective: Collective, world: World, first: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.calls = 0
        self.first = first
        self.collective = lambda tensor: collective(tensor, world)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.first <= self.calls:
            self.collective(out.detach().mean())
        return out


def _gather_objects(_: Tensor, world: World) -> None:
    dist.all_gather_object([None] * world.size, 3)


def _synchronized_metric(tensor: Tensor, _: World) -> Tensor:
    """Compute a metric as libraries of metrics do, which import names of their own."""
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered).sum()


# Name in the message.
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda tensor, _: dist.all_reduce(tensor),
    "all_reduce ": lambda tensor, world: all_reduce(tensor, group=world.process_group),
    "barrier": lambda _, __: barrier(),
    "broadcast": lambda tensor, _: dist.distributed_c10d.broadcast(tensor, 0),
    "all_gather_object": _gather_objects,
    "all_gather": _synchronized_metric,
    "all_reduce  ": lambda tensor, world: functional.all_reduce(tensor, "sum", world.process_group) + 0,
    "all_reduce   ": lambda tensor, _: differentiable.all_reduce(tensor),
    "all_gather ": samestep.all_gather,
    "all_reduce    ": lambda tensor, world: world.all_reduce(tensor),
    "barrier ": lambda _, world: world.barrier(),
}


def refused() -> dict[str, list[str]]:
    View.divides_small_calls = True
    x = torch.arange(48.0).view(8, 6)
    torch.manual_seed(0)
    with start(device="cpu") as world, world_of_process(world):
        texts = {}
        for name, collective in COLLECTIVES.items():
            model = samestep.parallel(Joined(collective, world))
            texts[name] = refusal(model, x)
        # A later call, which is divided on several ranks.
        later = Joined(COLLECTIVES["all_reduce"], world, first=4)
        model = samestep.parallel(later)
        for later.calls in range(4):
            model(x)
        later.calls = 4
        texts["later"] = refusal(model, x)
        # Outside of calls, and questions inside, are right.
        asking = samestep.parallel(Joined(lambda _, __: dist.get_rank(), world))
        texts["asks"] = refusal(asking, x)
        total = torch.ones(())
        dist.all_reduce(total)
        texts["outside"] = [str(sum(samestep.all_gather(1, world))), str(int(total))]
        return texts


def test_files_that_pass_collectives_on_exist() -> None:
    assert [file for file in _ENTRIES if not Path(file).is_file()] == []


@pytest.mark.ranks(1, 3)
def test_collectives_of_the_script_are_refused_in_calls(on_ranks: RankServer, ranks: int) -> None:
    texts = on_ranks(refused, ranks)
    for name in COLLECTIVES:
        code, text = texts[name]
        assert code == "E_INCOMPATIBLE", (name, text)
        assert f" {name.strip()} in a call of Joined" in text
        assert __file__ in text
    assert texts["later"][0] == "E_INCOMPATIBLE"
    assert texts["asks"] == ["none", ""]
    assert texts["outside"] == [str(ranks), str(ranks)]
