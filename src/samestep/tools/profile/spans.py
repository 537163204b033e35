"""Notes when a rank goes from one part of a step to the next, and when it communicates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import Variable

from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.buffers import training_modes
from samestep.engine.joint import has_joint_layers
from samestep.engine.loss import Loss
from samestep.engine.observer import Observed, Observer
from samestep.engine.result import StepResult
from samestep.runtime.call_site import call_site
from samestep.runtime.collectives import hear_collectives
from samestep.runtime.world import World
from samestep.tools.profile.clock import Clock, Moment
from samestep.tools.profile.steps import Meeting, Phase, Segment, Step


class Spans(Observer):
    """Notes the steps of one engine, without torch's profiler, which slows small operators down.

    A note is a word and a time: some ten a step, and two a communication. Backward ends for it when autograd has
    computed all gradients, before DDP begins to wait for what is still on its way.

    Attributes:
        is_on: steps are noted; else nothing is done.
        steps: those that were noted.
        is_apart: shards are computed one after another by the thread that trains.
        joins_norms: batch norm meets all ranks.
    """

    def __init__(self, world: World, clock: Clock) -> None:
        self.is_on = False
        self.steps: list[Step] = []
        self._world, self._clock = world, clock
        self._thread = threading.get_ident()
        self._marks: list[tuple[Phase, Moment, float]] = []
        self._meetings: list[tuple[str, str | None, bool, Moment, Moment]] = []
        self._within: set[int] = set()  # threads in which the engine communicates just now
        self._shards = self._told = 0
        self.is_apart = self._is_ddp = True
        self.joins_norms = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what ranks say to each other while the block runs, in the engine and in code of the user's own."""
        pulse = self._world.pulse
        restore = hear_collectives(lambda: self.is_on and threading.get_ident() not in self._within, self._hear)
        pulse.on_wait = self._wait
        try:
            yield
        finally:
            pulse.on_wait = None
            restore()

    def enter(self, phase: Phase) -> None:
        """From now on the thread that trains is at this."""
        if self.is_on:
            self._marks.append((phase, self._clock.now(), time.thread_time()))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step, from waiting for its data to its checkpoint."""
        self._marks, self._meetings, self._shards = [], [], 0
        yield
        if self.is_on:
            self.steps.append(self._noted(number, self._clock.now()))

    # --- what the engine says ---

    def made(self, engine: Observed) -> None:
        """An engine is ready."""
        self.joins_norms = engine.rules.batch_norm == "sync" and has_joint_layers(training_modes(engine.model))
        # There shards are computed side by side, or pass through this rank in turns.
        self.is_apart = (
            not self.joins_norms and engine.world.layout.pipeline == 1 and engine.world.strategy.name != "dp"
        )
        self._is_ddp = engine.strategy == "ddp" and engine.world.size > 1

    def begin_step(self, engine: Observed, batch: GlobalBatch) -> None:
        """A step begins; nothing has changed yet."""
        self._shards, self._told = len(batch.parts), 0
        if not self.is_apart:
            self.enter("computing")
        else:
            self.enter("other" if self._shards else "communication")  # who computes nothing waits for who does

    def begin_shard(self, part: Shard) -> None:
        """A shard is next."""
        if self.is_apart:
            self._told += 1
            self.enter("forward")

    def end_shard(self, part: Shard, outputs: Any, loss: Loss) -> None:
        """A shard's training forward and its loss are done."""
        if self.is_on and self.is_apart and loss.sum.requires_grad:
            self.enter("backward")
            if self._is_ddp and self._told == self._shards:
                loss.sum.register_hook(self._begin_backward)

    def end_gradients(self, engine: Observed) -> None:
        """Gradients are there."""
        self.enter("optimizer")

    def end_step(self, engine: Observed, result: StepResult) -> None:
        """A step is done."""
        self.enter("other")

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        # Callbacks are called in the order in which they were given, so this one comes before DDP's, which waits.
        Variable._execution_engine.queue_callback(lambda: self.enter("communication"))

    # --- what ranks say to each other ---

    def _wait(self, what: str) -> Callable[[], None]:
        thread = threading.get_ident()
        self._within.add(thread)
        end = self._meet(what, None, thread)

        def over() -> None:
            self._within.discard(thread)
            end()

        return over

    def _hear(self, what: str, waits: bool) -> Callable[[], None] | None:
        if not waits:
            return None  # whoever asked for it goes on
        site = call_site()
        # torch's own (FSDP's) come from here or from code that it has generated.
        is_users = not site.startswith(("samestep/", "<"))
        return self._meet(what, site if is_users else None, threading.get_ident())

    def _meet(self, what: str, site: str | None, thread: int) -> Callable[[], None]:
        begin = self._clock.now()

        def over() -> None:
            if self.is_on:
                self._meetings.append((what, site, thread != self._thread, begin, self._clock.now()))

        return over

    def _noted(self, number: int, end: Moment) -> Step:
        seconds = self._clock.seconds
        names = [phase for phase, _, _ in self._marks]
        moments = [*(seconds(moment) for _, moment, _ in self._marks), seconds(end)]
        used = [*(cpu for _, _, cpu in self._marks), time.thread_time()]
        cpu = [after - before for before, after in pairwise(used)]
        return Step(
            number,
            tuple(Segment(*each) for each in zip(names, moments[:-1], moments[1:], cpu, strict=True)),
            tuple(
                Meeting(what, site, beside, seconds(begin), seconds(over))
                for what, site, beside, begin, over in self._meetings
            ),
            self._shards,
        )
