"""Trials of `samestep bench` and `samestep tune` on one rank, and the memory of a rank: peak, held tensors, limit."""

from __future__ import annotations

import resource
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import psutil
import torch

from samestep.config import Recipe, RunOptions
from samestep.data.batch import GlobalBatch, Microbatch, tensors_of
from samestep.data.loader_workers import MANY_WORKERS
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World, all_gather
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.sync_batch_norm import norm_layers
from samestep.errors import InputError
from samestep.launcher.job import process_state
from samestep.recipes.builder import Built, build, start_world
from samestep.tools.bench import PROBED_STEPS, Contender, Probe, Trained
from samestep.tools.timing import Timing
from samestep.tools.tune.memory_check import Inspection
from samestep.tools.tune.search import SearchResult, search
from samestep.tools.tune.settings import Setting
from samestep.units import format_bytes

_WARMUP = 2  # steps until workers and ranks run at the same speed
_MAX_STEPS = 20
_BATCHES = 2  # preloaded batches of trials that do not measure data loading
_IMAGE_DIMENSIONS = 4
_RESERVED_BYTES = 32 << 20  # least memory of a rank in addition to that in use before the model


class StopRequested(Exception):
    """A stop was requested; raised after the same step on all ranks of the world of the engine."""


@dataclass(frozen=True)
class _TimedSteps:
    """Steps as one rank measured them."""

    seconds: float  # total time, including waits for batches
    samples: int  # over all ranks
    waits: list[float]  # wait of this rank for the batch of each step, in seconds

    @property
    def timing(self) -> Timing:
        return Timing(self.seconds / len(self.waits), sum(self.waits) / self.seconds, self.samples / self.seconds)


def train_contender(contender: Contender, epochs: int, options: RunOptions) -> Trained | None:
    """Train a variant for some epochs, or for one step if `epochs` is 0, and evaluate.

    Return None if a stop was requested.

    Raises:
        InputError: the variant cannot run.
    """
    with start_world(contender.recipe, options) as world:
        is_gpu = is_accelerator(world.device)
        if is_gpu:
            accelerator_module().reset_peak_memory_stats(world.device)
        built = _build(contender, options, world)
        steps = epochs * len(built.train) or 1
        warmup = min(PROBED_STEPS, steps - 1)
        try:
            timed = _time_steps(built.engine, built.train.endless(), warmup=warmup, steps=steps - warmup)
        except StopRequested:
            return None
        memory = held_bytes(built.engine), accelerator_module().max_memory_allocated(world.device) if is_gpu else 0
        values = built.engine.evaluate(built.evaluation, list(built.metrics)) if epochs else {}
        held, peak = (max(column) for column in zip(*all_gather(memory, world), strict=True))
        samples = built.train.samples
        return Trained(values, held, peak if is_gpu else None, samples, timed.timing if epochs else None)


def probe_contender(contender: Contender, options: RunOptions) -> Probe | None:
    """Time a few steps of a variant; return None if a stop was requested."""
    with start_world(contender.recipe, options) as world:
        built = _build(contender, options, world)
        try:
            timed = _time_steps(built.engine, built.train.endless(), warmup=PROBED_STEPS, steps=PROBED_STEPS)
        except StopRequested:
            return None
        return Probe(timed.timing.step_seconds, len(built.train), len(built.evaluation))


def time_contenders(contenders: Sequence[Contender], steps: int, options: RunOptions) -> list[Timing] | None:
    """Time some steps of each variant; return None if a stop was requested."""
    timings = []
    for contender in contenders:
        with start_world(contender.recipe, options) as world:
            built = _build(contender, options, world)
            try:
                timed = _time_steps(built.engine, built.train.endless(), warmup=PROBED_STEPS, steps=steps)
            except StopRequested:
                return None
            timings.append(timed.timing)
    return timings


def _build(contender: Contender, options: RunOptions, world: World) -> Built:
    built = build(contender.recipe, options, world)
    if contender.recipe.step.batch_norm == "sync" and not norm_layers(built.engine.model):
        raise InputError("the model has no batch norm")
    return built


def inspect_recipe(recipe: Recipe, options: RunOptions, memory: int | None) -> Inspection | None:
    """Train two steps under a memory limit of this rank in bytes; return None if a stop was requested."""
    with start_world(recipe, options) as world:
        if memory is not None:
            limit_memory(memory, world.device)
        built = build(recipe, options, world)
        train = built.train.with_workers(0, options.prefetch)
        batches = list(islice(train.endless(), _BATCHES))
        if any(built.engine.step(batch).stop for batch in batches):
            return None
        model = built.engine.model
        dropouts = (module for module in model.modules() if isinstance(module, torch.nn.modules.dropout._DropoutNd))
        inputs = [tensor for batch in batches for data in batch.local_microbatches for tensor in tensors_of(data.data)]
        return Inspection(
            device=world.device.type,
            workers=built.train.num_workers,
            peak=max(all_gather(peak_memory(world.device), world)),
            norms=len(norm_layers(model)),
            dropouts=sum(module.p > 0 for module in dropouts),
            has_images=any(tensor.dim() == _IMAGE_DIMENSIONS for tensor in inputs),
        )


def search_settings(
    recipe: Recipe, options: RunOptions, settings: Sequence[Setting], default: Setting, seconds: float
) -> SearchResult | None:
    """Search the fastest loader setting in trials of about `seconds`; return None if a stop was requested."""
    warnings.filterwarnings("ignore", message=MANY_WORKERS)  # the search finds out how many are too many
    with start_world(recipe, options) as world:
        built = build(recipe, replace(options, workers=0), world)

        def measure(setting: Setting) -> Timing:
            timing = time_setting(built, setting, seconds)
            if world.is_main and not options.quiet:
                print(f"  {setting}: {timing.samples_per_second:,.0f} samples/s", file=sys.stderr, flush=True)
            return timing

        try:
            _time_steps(built.engine, built.train.endless(), warmup=_WARMUP, steps=1)
            return search(measure, settings, default)
        except StopRequested:
            return None


def time_setting(built: Built, setting: Setting, seconds: float) -> Timing:
    """Time a loader setting. Each trial continues with the next samples, so that no trial finds files in the cache."""
    engine, data = built.engine, built.train
    with engine.world.context.status.operation(f"trial of {setting}"):
        loader = data.with_workers(setting.workers, setting.prefetch)
        try:
            return time_engine(engine, loader.endless(), seconds=seconds)
        finally:
            loader.close()
            data.cursor = loader.cursor


class _MicrobatchTimer(Callback):
    """Records the times at which the microbatches of a step begin."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.begins: list[float] = []

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        self.device, self.begins = engine.world.device, []

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        if self.device is not None:
            synchronize(self.device)
        self.begins.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Mean time of the microbatches before the last one, whose backward waits for other ranks."""
        return (self.begins[-1] - self.begins[0]) / (len(self.begins) - 1)


def rank_speeds(recipe: Recipe, options: RunOptions, steps: int) -> list[float] | None:
    """Return the microbatches per second of each rank with data of its own, without waits for other ranks.

    Each rank has at least two microbatches. Loading counts in proportion to the number of microbatches. Return None if
    a stop was requested.
    """
    timer, recipe = _MicrobatchTimer(), replace(recipe, step=replace(recipe.step, merge="off"))
    process_state.callbacks.append(timer)
    with start_world(recipe, options) as world:
        built = build(recipe, options, world)
        batches, seconds = built.train.endless(), list[float]()
        for number in range(_WARMUP + steps):
            asked = time.perf_counter()
            batch = next(batches)
            loading = (time.perf_counter() - asked) / len(batch.local_microbatches)
            if built.engine.step(batch).stop:
                return None
            if number >= _WARMUP and len(timer.begins) > 1:
                seconds.append(timer.seconds + loading)
        return [1 / cost for cost in all_gather(statistics.median(seconds), world.data)]


def compare_recipes(
    recipe: Recipe, other: Recipe, options: RunOptions, rounds: int, seconds: float
) -> list[float] | None:
    """Return the speed of `other` relative to `recipe` in each round, on preloaded batches.

    Both engines exist at the same time, and alternate. Return None if a stop was requested.
    """
    with start_world(recipe, options) as world:
        built = build(recipe, replace(options, workers=0), world)
        batches = list(islice(built.train.endless(), _BATCHES))
        is_same_engine = replace(recipe.step, threads=other.step.threads) == other.step
        changed = built if is_same_engine else build(other, replace(options, workers=0), world)
        sides = [(built.engine, recipe.step.threads), (changed.engine, other.step.threads)]

        def speeds(order: int, seconds: float) -> list[float]:
            timings = [time_engine(engine, cycle(batches), seconds=seconds, threads=n) for engine, n in sides[::order]]
            return [timing.samples_per_second for timing in timings[::order]]

        try:
            speeds(1, seconds=0)  # selects kernels and compiles
            pairs = [speeds(-1 if number % 2 else 1, seconds) for number in range(rounds)]
        except StopRequested:
            return None
        return [new / base for base, new in pairs]


def time_engine(
    engine: Engine, batches: Iterator[GlobalBatch], *, seconds: float, threads: int | None = None
) -> Timing:
    """Time steps for about `seconds`, at least two; equally many on every rank."""
    if threads is not None:
        torch.set_num_threads(threads)
    first = _agree(_time_steps(engine, batches, warmup=_WARMUP, steps=2), engine.world)
    steps = min(round((seconds - first.seconds) / first.timing.step_seconds), _MAX_STEPS - 2)
    if steps <= 0:
        return first.timing
    rest = _agree(_time_steps(engine, batches, warmup=0, steps=steps), engine.world)
    return _TimedSteps(first.seconds + rest.seconds, first.samples + rest.samples, first.waits + rest.waits).timing


def _time_steps(engine: Engine, batches: Iterator[GlobalBatch], *, warmup: int, steps: int) -> _TimedSteps:
    """Train `warmup` steps, then time `steps` more; raise `StopRequested` after a stop request. Collective."""
    if any(engine.step(batch).stop for batch in islice(batches, warmup)):
        raise StopRequested
    samples, waits = 0, []
    synchronize(engine.world.device)
    engine.world.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        if engine.step(batch).stop:
            raise StopRequested
        samples += batch.size
    synchronize(engine.world.device)
    engine.world.barrier()
    return _TimedSteps(time.perf_counter() - began, samples, waits)


def synchronize(device: torch.device) -> None:
    """Wait for the computations of an accelerator."""
    if is_accelerator(device):
        accelerator_module().synchronize(device)


def _agree(timed: _TimedSteps, world: World) -> _TimedSteps:
    """Return the same times on all ranks: the longest wait of each step, because a step waits for its last rank."""
    seconds, waits = zip(*all_gather([timed.seconds, timed.waits], world), strict=True)
    return _TimedSteps(max(seconds), timed.samples, [max(of_step) for of_step in zip(*waits, strict=True)])


def held_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, gradients, buffers and optimizer state on this rank."""
    parameters = list(engine.local_parameters.local.values())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in engine.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    tensors = [*parameters, *gradients, *engine.model.buffers(), *state]
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


def limit_memory(memory: int, device: torch.device) -> None:
    """Limit the memory of the GPU or of this process; allocations above the limit fail.

    Raises:
        InputError: this process uses more already.
    """
    if is_accelerator(device):
        total = accelerator_module().get_device_properties(device).total_memory
        accelerator_module().set_per_process_memory_fraction(min(1.0, memory / total), device)
        return
    # Heap and private mappings (getrlimit(2)): a limit of the address space would count reservations. Their size is
    # available on Linux only.
    minimum = getattr(psutil.Process().memory_info(), "data", 0) + _RESERVED_BYTES
    if memory < minimum:
        raise InputError(
            f"--memory {format_bytes(memory)}: a rank needs {format_bytes(minimum)} before the model is built",
            expected="the total memory of a rank, including Python and torch",
            fix=f"--memory {2 * minimum >> 20}MiB",
            code="E_MEMORY_LIMIT",
        )
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far in bytes: of tensors on a GPU, of the process on a CPU."""
    if is_accelerator(device):
        return int(accelerator_module().max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
