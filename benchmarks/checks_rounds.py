"""Rank function of `checks.py`: engines with and without checks, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from step_models import build_dataset, build_model, build_optimizer

import samestep
from samestep.data.batch import GlobalBatch
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.world import RunContext
from samestep.engine.engine import Engine

READY = 8  # global batches that every engine goes round


@dataclass(frozen=True)
class Plan:
    """One measurement.

    Attributes:
        variants: options of an engine by name; None is an engine that is not checked.
        rounds: how often each variant has a turn.
        block: steps a turn; a multiple of the intervals of all variants.
    """

    model: str
    batch_size: int
    variants: dict[str, dict[str, int] | None]
    rounds: int
    block: int
    warmup: int


def measure(plan: Plan) -> list[dict[str, tuple[float, float]]]:
    """Return seconds and processor seconds per step of rank 0, by variant, of every round."""
    with samestep.start(device="cpu") as world:
        loader = samestep.loader(
            build_dataset(), batch_size=plan.batch_size, microbatches=world.size, shuffle=True, world=world
        )
        batches = list(islice(loader, READY))
        engines = {name: _engine(plan.model, world, options) for name, options in plan.variants.items()}
        for engine in engines.values():
            _turn(engine, batches, plan.warmup, world)
        names = list(engines)
        found = []
        for number in range(plan.rounds):
            shift = number // 2 % len(names)
            order = [*names[shift:], *names[:shift]]
            turns = order if number % 2 == 0 else order[::-1]
            found.append({name: _turn(engines[name], batches, plan.block, world) for name in turns})
        return found


def _engine(model: str, world: samestep.World, options: dict[str, int] | None) -> Engine:
    rank, size, context = world.rank, world.size, RunContext.local()
    if options is not None and "check_every" not in options:
        check = CollectiveCheck(dist.HashStore(), context.status, rank=rank, size=size, timeout=world.timeout)
        context = replace(context, collective_check=check)
    if options is None or "check_every" not in options:
        world = samestep.World(rank=rank, size=size, device=world.device, context=context)
    made = build_model(model)
    checks = dict(options or {})
    callbacks = [samestep.Witness(checks.pop("witness_every"))] if "witness_every" in checks else []
    optimizer = build_optimizer(made)
    return Engine(made, optimizer, samestep.cross_entropy, world=world, callbacks=callbacks, **checks)


def _turn(engine: Engine, batches: Sequence[GlobalBatch], steps: int, world: samestep.World) -> tuple[float, float]:
    vote = torch.zeros(1)
    world.all_reduce(vote)
    began, used = time.perf_counter(), time.process_time()
    for number in range(steps):
        engine.step(batches[number % len(batches)])
    world.all_reduce(vote)
    return (time.perf_counter() - began) / steps, (time.process_time() - used) / steps
