"""Measurements of a calibration on one rank: steps without communication, messages, sizes, and trials of strategies."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from samestep.config import Recipe, RunOptions, StrategyConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.resources import read_processors
from samestep.distributed.world import World, all_gather
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.step_stats import StepResult
from samestep.recipes.builder import Built, build, start_world
from samestep.strategies.reduction import communicate
from samestep.tools.plan.calibration import Calibration, LocalStep
from samestep.tools.plan.collectives import Link
from samestep.tools.plan.structure import model_facts
from samestep.tools.timing import Spread
from samestep.tools.trials import StopRequested, peak_memory, synchronize, time_engine

_ROUNDS = 3
_SIZES = (64, 4 << 20)  # bytes of messages
_REPEATS = (30, 6)
_COPY_BYTES = 64 << 20
# Torch 2.13 renamed the collective that FSDP uses.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_QUARTILES = 1.35  # distance of the quartiles of a normal distribution, in standard deviations


class _UpdateTimer(Callback):
    """Records the times of steps, and the part of each after the gradients.

    Attributes:
        is_active: whether steps are recorded.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._updates: list[float] = []
        self._steps: list[float] = []
        self._begin = self._gradients = 0.0

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        self._begin = time.perf_counter()

    def end_gradients(self, engine: Engine) -> None:
        synchronize(engine.world.device)
        self._gradients = time.perf_counter()

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if self.is_active:
            now = time.perf_counter()
            self._updates.append(now - self._gradients)
            self._steps.append(now - self._begin)

    def take(self) -> tuple[float, float]:
        """Return the median time after the gradients, and the relative deviation of steps, since the last call."""
        update, steps = statistics.median(self._updates), Spread.of(self._steps)
        self._updates, self._steps = [], []
        return update, (steps.q3 - steps.q1) / steps.median / _QUARTILES


def calibrate(
    recipe: Recipe,
    options: RunOptions,
    strategies: Sequence[StrategyConfig],
    devices: int,
    levels: Sequence[int],
    seconds: float,
) -> Calibration | None:
    """Measure a recipe on the ranks of this machine; return None if a stop was requested.

    Each rank builds the recipe for itself, with the microbatches that it would have, and ranks compute without
    communication: one alone, and several at the same time.

    Args:
        recipe: recipe to measure.
        options: device and loader workers.
        strategies: strategies on `devices` devices, checked against the model.
        devices: number of devices of the plan.
        levels: numbers of ranks above 1 that compute at the same time, at most the number of ranks.
        seconds: approximate duration of one measurement.
    """
    timer = _UpdateTimer()
    with start_world(replace(recipe, strategy=StrategyConfig()), options) as world:
        rank = _Rank(world, _alone(world, timer), recipe, options, timer, seconds)
        base = peak_memory(world.device)
        try:
            steps, slowdown, deviation = rank.measure(levels, devices)
        except StopRequested:
            return None
        facts = model_facts(rank.build(1), recipe, strategies, devices)
        pairs, gathers, messages = _measure_links(world, levels)
        return Calibration(
            device=world.device.type,
            cores=None if is_accelerator(world.device) else read_processors().usable,
            base=base,
            steps=steps,
            slowdown=slowdown,
            pairs=pairs,
            gathers=gathers,
            messages=messages,
            copy_seconds=_copy_seconds(world.device),
            deviation=deviation,
            facts=facts,
        )


def _alone(world: World, callback: Callback) -> World:
    """Return a world of this rank alone, whose steps are not compared with those of other ranks. Collective."""
    groups = [dist.new_group([rank], timeout=world.timeout) for rank in range(world.size)]
    alone, status = world.subworld(groups[world.rank]), world.context.status
    check = CollectiveCheck(dist.HashStore(), status, rank=0, size=1, timeout=world.timeout)
    return replace(alone, context=replace(world.context, collective_check=check, callbacks=(callback,)))


@dataclass
class _Rank:
    """Measurements of one rank, in which all ranks take part in the same order."""

    world: World
    alone: World
    recipe: Recipe
    options: RunOptions
    timer: _UpdateTimer
    seconds: float

    def measure(self, levels: Sequence[int], devices: int) -> tuple[dict[int, LocalStep], dict[int, float], float]:
        """Return steps by number of microbatches, slowdowns by number of active ranks, and the deviation."""
        steps: dict[int, LocalStep] = {}
        slowdown, deviations = {1: 1.0}, []
        counts = microbatch_counts(self.recipe.microbatch_count, devices)
        measured_with = {level: _closest(counts, self.recipe.microbatch_count // level) for level in levels}
        for count in counts:
            built = self.build(count)
            active = [1, *(level for level in levels if measured_with[level] == count)]
            rounds = [[self._time(built, level) for level in active]]
            while len(rounds) < _ROUNDS and sum(rounds[0]) < self.seconds:
                rounds.append([self._time(built, level) for level in active])
            single, *others = (min(column) for column in zip(*rounds, strict=True))  # other programs only add time
            update, deviation = self.timer.take() if self.world.is_main else (0.0, 0.0)
            deviations.append(deviation)
            steps[count] = LocalStep(single, update, peak_memory(self.world.device))
            slowdown |= {level: max(1.0, time / single) for level, time in zip(active[1:], others, strict=True)}
            del built
        return steps, slowdown, statistics.median(deviations)

    def build(self, count: int) -> Built:
        """Build the recipe on this rank alone, with `count` microbatches of the same size."""
        gc.collect()  # of the engine before this one: the peak of memory grows with the number of microbatches
        if is_accelerator(self.world.device):
            accelerator_module().reset_peak_memory_stats(self.world.device)
        total = self.recipe.batch_size * count // self.recipe.microbatch_count
        part = replace(self.recipe, batch_size=total, microbatches=count, strategy=StrategyConfig())
        return build(part, self.options, self.alone)

    def _time(self, built: Built, level: int) -> float:
        """Return the time of a step on the slowest of `level` ranks that compute; the others wait.

        Raises:
            StopRequested: a rank received a stop request; raised on all ranks.
        """
        self.world.barrier()
        measured = 0.0
        self.timer.is_active = level == 1
        if self.world.rank < level:
            with suppress(StopRequested):  # this rank alone has stopped; the others still wait for the gather
                timing = time_engine(built.engine, built.train.endless(), seconds=self.seconds)
                measured = timing.step_seconds
        times, stops = zip(*all_gather([measured, self.world.stop_requested], self.world), strict=True)
        if any(stops):
            raise StopRequested
        return float(max(times[:level]))


def microbatch_counts(microbatches: int, devices: int) -> list[int]:
    """Return the numbers of microbatches of a rank to measure: 1, all, and those on each power of two of devices."""
    shares = {max(1, microbatches // 2**power) for power in range(devices.bit_length())}
    return sorted({1, *shares})


def _closest(numbers: Sequence[int], value: int) -> int:
    return min(numbers, key=lambda number: abs(number - value))


def _measure_links(world: World, levels: Sequence[int]) -> tuple[dict[int, Link], dict[int, Link], dict[int, Link]]:
    """Return links of pairs that exchange and add, of the all-gather, and of single messages, by active ranks."""
    pairs: dict[int, Link] = {}
    gathers: dict[int, Link] = {}
    messages: dict[int, Link] = {}
    # NCCL connects a group in its first collective, for which it waits for all ranks: not in an exchange of two.
    world.all_reduce(torch.zeros(1, device=world.device))
    for level in levels:
        group = dist.new_group(list(range(level)), timeout=world.timeout)
        is_active, peer = world.rank < level, world.rank ^ 1
        has_peer = is_active and peer < level
        _ = world.sockets  # connects all ranks, a collective

        def exchange(tensor: torch.Tensor, received: torch.Tensor, peer: int = peer) -> None:
            communicate(world, [(tensor, peer)], [(received, peer)])
            tensor.add_(received)

        def gather(
            tensor: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup = group, level: int = level
        ) -> None:
            _all_gather(received, tensor[: received.numel() // level], group=group)

        def send(tensor: torch.Tensor, received: torch.Tensor, peer: int = peer) -> None:
            if world.rank < peer:
                dist.send(tensor, peer)
                dist.recv(received, peer)
            else:
                dist.recv(received, peer)
                dist.send(tensor, peer)

        pairs[level] = _link(world, exchange if has_peer else None, level)
        gathered = _link(world, gather if is_active else None, level)
        gathers[level] = Link(gathered.latency / (level - 1), gathered.byte_seconds * level / (level - 1))
        messages[level] = _link(world, send if has_peer else None, level).scaled(0.5)  # there and back
    return pairs, gathers, messages


def _link(world: World, communicate_once: Callable[[torch.Tensor, torch.Tensor], None] | None, level: int) -> Link:
    """Return the link of the slowest rank; None for ranks that take no part."""
    seconds = []
    for size, repeats in zip(_SIZES, _REPEATS, strict=True):
        length = size // 4 // level * level
        tensor = torch.zeros(max(level, length), device=world.device)
        received = torch.empty_like(tensor)
        times = [0.0]
        if communicate_once is not None:
            communicate_once(tensor, received)
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                communicate_once(tensor, received)
                synchronize(world.device)
                times.append(time.perf_counter() - began)
        seconds.append(max(all_gather(min(times), world)[:level]))
    small, large = seconds
    return Link(small, max(0.0, large - small) / _SIZES[1])


def _copy_seconds(device: torch.device) -> float:
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source, device="cpu")
    target.copy_(source)
    began = time.perf_counter()
    target.copy_(source)
    synchronize(device)
    return (time.perf_counter() - began) / _COPY_BYTES


def try_strategies(
    recipe: Recipe, strategies: Sequence[StrategyConfig], options: RunOptions, seconds: float
) -> list[tuple[float, int]] | None:
    """Return the time of a step under each strategy on all ranks, and the memory of a rank beyond its base.

    Return None if a stop was requested.
    """
    results = []
    for strategy in strategies:
        variant = replace(recipe, strategy=strategy)
        with start_world(variant, options) as world:
            base = peak_memory(world.device)
            built = build(variant, options, world)
            try:
                timings = [time_engine(built.engine, built.train.endless(), seconds=seconds) for _ in range(_ROUNDS)]
            except StopRequested:
                return None
            peak = max(all_gather(peak_memory(world.device) - base, world))
            results.append((min(timing.step_seconds for timing in timings), peak))
            del built
            gc.collect()
    return results
