"""Rank function of `early_step.py`: plain DDP loops that update after or during backward, in turns."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from step_models import build_dataset, build_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import samestep

ALONE = "the update alone"
READY = 8  # batches that every loop goes round
TOLERANCE = 1e-5  # of weights after the first steps: both compute the same

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Variant:
    """One loop.

    Attributes:
        early: the parameters of a bucket are updated as soon as its gradients are there.
        bucket_mb: megabytes of gradients that travel together; None for torch's own.
    """

    early: bool
    bucket_mb: float | None


@dataclass(frozen=True)
class Plan:
    """One measurement."""

    model: str
    optimizer: str
    batch_size: int
    variants: dict[str, Variant]
    rounds: int
    block: int
    warmup: int


class Loop:
    """A hand-written loop over one model."""

    def __init__(self, plan: Plan, variant: Variant, world: samestep.World) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            build_model(plan.model), gradient_as_bucket_view=True, bucket_cap_mb=variant.bucket_mb
        )
        self._make, self._world, self._early = OPTIMIZERS[plan.optimizer], world, variant.early
        self._whole = self._make(self.model.parameters(), lr=1e-3)
        self._by_bucket: dict[torch.Tensor, torch.optim.Optimizer] = {}
        self._steps = 0
        self.model.register_comm_hook(None, self._sum)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._steps += 1
        self.model.zero_grad(set_to_none=True)
        cross_entropy(self.model(inputs), targets).backward()
        # DDP rebuilds its buckets before the second step.
        if not self._early or self._steps == 1:
            self._whole.step()

    def update_alone(self) -> float:
        """Seconds of an update by the gradients that are there."""
        self._world.barrier()
        began = time.perf_counter()
        self._whole.step()
        return time.perf_counter() - began

    def _sum(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters, flat = bucket.parameters(), bucket.buffer().div_(self._world.size)
        summed = dist.all_reduce(flat, async_op=True).get_future()
        if not self._early or self._steps == 1:
            return summed.then(lambda done: done.value()[0])
        if parameters[0] not in self._by_bucket:
            self._by_bucket[parameters[0]] = self._taken_over(parameters)
        optimizer, gradients = self._by_bucket[parameters[0]], bucket.gradients()

        def update(done: torch.futures.Future[Any]) -> torch.Tensor:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            return flat

        return summed.then(update)

    def _taken_over(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of some parameters that continues from the first step."""
        optimizer = self._make(parameters, lr=1e-3)
        for parameter in parameters:
            optimizer.state[parameter] = self._whole.state[parameter]
        return optimizer


def measure(plan: Plan) -> list[dict[str, float]]:
    """Return seconds per step of every variant in every round; a function for `samestep.launch`."""
    with samestep.start(device="cpu", reduction="fast") as world:
        loader = samestep.loader(
            build_dataset(), batch_size=plan.batch_size, microbatches=world.size, shuffle=True, world=world
        )
        batches = [batch.local_microbatches[0].data for batch in islice(loader, READY)]
        loops = {name: Loop(plan, variant, world) for name, variant in plan.variants.items()}
        for loop in loops.values():
            _turn(loop, batches, plan.warmup, world)
        _require_same(list(loops.values()))
        names = list(loops)
        found = []
        for number in range(plan.rounds):
            shift = number // 2 % len(names)
            order = [*names[shift:], *names[:shift]]
            turns = order if number % 2 == 0 else order[::-1]
            found.append({name: _turn(loops[name], batches, plan.block, world) for name in turns})
            found[-1][ALONE] = loops[names[0]].update_alone()
        return found


def _turn(loop: Loop, batches: Sequence[tuple[Any, Any]], steps: int, world: samestep.World) -> float:
    world.barrier()
    began = time.perf_counter()
    for number in range(steps):
        loop.step(*batches[number % len(batches)])
    world.barrier()
    return (time.perf_counter() - began) / steps


def _require_same(loops: Sequence[Loop]) -> None:
    first, *others = [torch.cat([p.detach().flatten() for p in loop.model.parameters()]) for loop in loops]
    for other in others:
        distance = float((other - first).norm() / first.norm())
        assert distance < TOLERANCE, f"weights differ by {distance} after the first steps"
