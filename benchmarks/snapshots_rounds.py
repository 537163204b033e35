"""Rank function of `snapshots.py`: the same steps without a save, with a save, and during a save, in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from step_models import build_dataset, build_model, build_optimizer

import samestep
from samestep.checkpoint.snapshot import AsyncCheckpointWriter, SavedCheckpoint
from samestep.checkpoint.state import Progress, Training, snapshot
from samestep.checkpoint.store import CheckpointFolder
from samestep.data.batch import GlobalBatch
from samestep.engine.engine import Engine

READY = 8  # global batches that the engine goes round
OFF, AGAIN, BLOCKING, BACKGROUND = "no saves", "no saves, again", "blocking", "background"
VARIANTS = (OFF, AGAIN, BLOCKING, BACKGROUND)


@dataclass(frozen=True)
class Plan:
    """One measurement.

    Attributes:
        folder: where checkpoints go.
        rounds: how often each variant has a turn.
        block: steps a turn; the second of them is followed by the save.
    """

    model: str
    batch_size: int
    folder: Path
    rounds: int
    block: int
    warmup: int


class Turns:
    """One engine, and ways to save its state."""

    def __init__(self, plan: Plan, world: samestep.World) -> None:
        self._plan, self._world = plan, world
        model = build_model(plan.model)
        self._engine = Engine(model, build_optimizer(model), samestep.cross_entropy, world=world)
        self.saved: list[SavedCheckpoint] = []
        self.pauses: dict[str, list[float]] = {BLOCKING: [], BACKGROUND: []}
        self._saver = AsyncCheckpointWriter(CheckpointFolder(plan.folder), self.saved.append)

    def turn(self, variant: str, batches: Sequence[GlobalBatch], steps: int) -> float:
        """Return seconds per step, including the end of a save that is in progress."""
        vote = torch.zeros(1)
        self._world.all_reduce(vote)
        began = time.perf_counter()
        for number in range(steps):
            self._engine.step(batches[number % len(batches)])
            if number == 1 and variant in self.pauses and self._world.is_main:
                self._save(variant)
        self._saver.wait()
        self._world.all_reduce(vote)
        return (time.perf_counter() - began) / steps

    def _save(self, variant: str) -> None:
        engine, began = self._engine, time.perf_counter()
        training = Training(engine.model, engine.optimizer, engine.scheduler, engine.scaler)
        self._saver.save(engine.steps, partial(snapshot, training, Progress(step=engine.steps)))
        if variant == BLOCKING:
            self._saver.wait()
        self.pauses[variant].append(time.perf_counter() - began)


def measure(plan: Plan) -> dict[str, Any]:
    """Return seconds per step of every variant in every round, and times of saves; a function for `samestep.launch`."""
    with samestep.start(device="cpu") as world:
        loader = samestep.loader(
            build_dataset(), batch_size=plan.batch_size, microbatches=world.size, shuffle=True, world=world
        )
        batches = list(islice(loader, READY))
        turns = Turns(plan, world)
        for variant in VARIANTS:
            turns.turn(variant, batches, plan.warmup)
        found = []
        for number in range(plan.rounds):
            order = [*VARIANTS[number % 4 :], *VARIANTS[: number % 4]]
            found.append({name: turns.turn(name, batches, plan.block) for name in order})
        newest = CheckpointFolder(plan.folder).newest_valid() if world.is_main else None
        return {
            "rounds": found,
            "pauses": turns.pauses,
            "writing": [saved.seconds for saved in turns.saved],
            "bytes": sum(os.path.getsize(file) for file in newest.iterdir()) if newest else 0,
        }
