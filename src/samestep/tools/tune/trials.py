"""What every rank of a trial does: the same on all of them, so that all come to the same choice."""

from __future__ import annotations

import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import torch

from samestep.config import Recipe, RunOptions
from samestep.data.batch import GlobalBatch
from samestep.data.loader import MANY_WORKERS
from samestep.data.tensors import map_tensors
from samestep.engine.norm import norm_layers
from samestep.engine.step import Engine
from samestep.errors import InputError
from samestep.recipes.build import Built, build, world_of
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World
from samestep.tools.timed import Timed
from samestep.tools.tune.look import Look
from samestep.tools.tune.search import Found, search
from samestep.tools.tune.setting import Setting
from samestep.tools.turn import Turn, time_steps

_WARMUP = 2  # steps after which workers are in step with the ranks
_MOST_STEPS = 20
_BATCHES = 2  # that are at hand where data is not what is looked at
_LEAST_BYTES = 32 << 20  # for whatever a rank needs besides its model
_IMAGES = 4  # dimensions of what can be laid out channels last


class _Asked(Exception):
    """Somebody asked to end; all ranks see it after the same step."""


def look(recipe: Recipe, options: RunOptions, memory: int | None) -> Look | None:
    """Make two steps, in at most so much memory; nothing if somebody asked to end.

    Args:
        memory: bytes that this rank may take, of its GPU or, on a CPU, for itself; None for all that there is.
    """
    with world_of(recipe, options) as world:
        if memory is not None:
            _limit(memory, world.device)
        built = build(recipe, options, world)
        workers = built.train.workers
        train = built.train.with_workers(0, options.prefetch)
        batches = list(islice(train.endless(), _BATCHES))
        if any(built.engine.step(batch).stop for batch in batches):
            return None
        peak = max(all_gather(_peak(world.device), world))
        modules = list(built.engine.model.modules())
        dropouts = sum(isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p > 0 for each in modules)
        norms = len(norm_layers(built.engine.model))
        return Look(world.device.type, workers, peak, norms, dropouts, any(map(_has_images, batches)))


def find(
    recipe: Recipe, options: RunOptions, settings: Sequence[Setting], default: Setting, seconds: float
) -> Found | None:
    """The fastest of some settings; nothing if somebody asked to end.

    Args:
        seconds: about how long a turn is.
    """
    warnings.filterwarnings("ignore", message=MANY_WORKERS)  # how many are too many is what is asked here
    with world_of(recipe, options) as world:
        built = build(recipe, replace(options, workers=0), world)
        if time_steps(built.engine, built.train.endless(), warmup=_WARMUP, steps=1) is None:
            return None

        def measure(setting: Setting) -> Timed:
            timed = take_turn(built, setting, seconds)
            if world.is_main and not options.quiet:
                print(f"  {setting}: {timed.samples_per_second:,.0f} samples/s", file=sys.stderr, flush=True)
            return timed

        try:
            return search(measure, settings, default)
        except _Asked:
            return None


def against(recipe: Recipe, other: Recipe, options: RunOptions, rounds: int, seconds: float) -> list[float] | None:
    """How many times as fast steps are by other rules, with batches at hand, of each round; nothing if asked to end.

    Both live side by side, and have turns.
    """
    with world_of(recipe, options) as world:
        built = build(recipe, replace(options, workers=0), world)
        batches = list(islice(built.train.endless(), _BATCHES))
        same = replace(recipe.step, threads=other.step.threads) == other.step
        changed = built if same else build(other, replace(options, workers=0), world)
        sides = [(built.engine, recipe.step.threads), (changed.engine, other.step.threads)]
        found = []
        try:
            for engine, threads in sides:  # chooses kernels, compiles
                _turn(engine, cycle(batches), seconds=0, threads=threads)
            for number in range(rounds):
                turns = [
                    _turn(engine, cycle(batches), seconds=seconds, threads=threads)
                    for engine, threads in (sides[::-1] if number % 2 else sides)
                ]
                base, new = turns[::-1] if number % 2 else turns
                found.append(new.samples_per_second / base.samples_per_second)
        except _Asked:
            return None
        return found


def take_turn(built: Built, setting: Setting, seconds: float) -> Timed:
    """A turn with workers of its own, from where the last one ended: no setting finds another one's files in memory."""
    engine, data = built.engine, built.train
    with engine.world.pulse.during(f"trial of {setting}"):
        loader = data.with_workers(setting.workers, setting.prefetch)
        try:
            return _turn(engine, loader.endless(), seconds=seconds)
        finally:
            loader.close()
            data.cursor = loader.cursor


def _turn(engine: Engine, batches: Iterator[GlobalBatch], *, seconds: float, threads: int | None = None) -> Timed:
    """Steps for about so long, at least two; the same number on every rank."""
    if threads is not None:
        torch.set_num_threads(threads)
    parts = [_agreed(time_steps(engine, batches, warmup=_WARMUP, steps=2), engine.world)]
    left = round((seconds - parts[0].seconds) / parts[0].timed.step_seconds)
    if left > 0:
        more = time_steps(engine, batches, warmup=0, steps=min(left, _MOST_STEPS - 2))
        parts.append(_agreed(more, engine.world))
    waits = [wait for part in parts for wait in part.waits]
    return Turn(sum(part.seconds for part in parts), sum(part.samples for part in parts), waits).timed


def _agreed(turn: Turn | None, world: World) -> Turn:
    """A turn as all ranks see it: of each step the longest wait, for a step waits for its last rank."""
    if turn is None:
        raise _Asked
    seconds, waits = zip(*all_gather([turn.seconds, turn.waits], world), strict=True)
    return Turn(max(seconds), turn.samples, [max(each) for each in zip(*waits, strict=True)])


def _has_images(batch: GlobalBatch) -> bool:
    seen: list[int] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.dim())
        return tensor

    for part in batch.parts:
        map_tensors(part.data, see)
    return _IMAGES in seen


def _limit(memory: int, device: torch.device) -> None:
    """Have whatever takes more than so much of a GPU, or of memory of this process' own, fail.

    Raises:
        InputError: it has taken as much already.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
        return
    # Heap and private mappings (getrlimit(2)): an address space would count what is only reserved.
    taken = _private_bytes() + _LEAST_BYTES
    if memory < taken:
        raise InputError(
            f"--memory is {memory >> 20} MiB, and a rank takes {taken >> 20} MiB before it has a model",
            rule="what a rank may take in all, Python and torch among it",
            do=f"--memory {2 * taken >> 20}MiB",
        )
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _private_bytes() -> int:
    """What the limit counts, of this process (proc(5)); 0 where there is no such file."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
