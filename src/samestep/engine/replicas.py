"""Microbatches computed on replicas of the model, by several threads at once or in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from samestep.data.batch import GlobalBatch, Microbatch, move
from samestep.distributed.devices import rank_devices
from samestep.distributed.rng import generator_state
from samestep.engine.batch_norm import Direction, StatisticsExchange, norm_layers, synchronize_layers
from samestep.engine.batch_statistics import one_value_errors
from samestep.engine.buffers import MicrobatchBuffers, Rule
from samestep.engine.callbacks import Callback
from samestep.engine.forward_state import ForwardState
from samestep.engine.gather import LocalOutputs, Roots
from samestep.engine.global_loss import NO_LOSS, GlobalLoss, OutputGradients
from samestep.engine.lockstep import Threads, ThreadState, Track, run_in_lockstep
from samestep.engine.loss import Loss
from samestep.engine.microbatch import TRAINING, SequentialRunner, StepRunner
from samestep.engine.non_finite import flagged_by_any, has_finite_gradient
from samestep.engine.pipeline import PipelineRunner
from samestep.engine.step_stats import LocalStats, StepStats
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree


class Replica(NamedTuple):
    """Copy of a model, which shares everything except parameters and buffers."""

    module: nn.Module
    parameters: dict[nn.Parameter, nn.Parameter]  # of the model, with their copies: the same memory, another `.grad`


def replicate(
    model: nn.Module,
    device: torch.device | None = None,
    weights: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> Replica:
    """Return a replica of `model`, copied as in `torch.nn.DataParallel`; tied and shared modules stay so.

    `device` is that of the buffers, and `weights` has the storage of the parameters; None for the model's own.

    Raises:
        InputError: a parameter has hooks, which would miss the gradients of a replica.
    """
    _require_no_hooks(model)
    modules = list(model.modules())
    copies: dict[nn.Module, nn.Module] = {module: module._replicate_for_data_parallel() for module in modules}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in parameters:
                values = parameter if weights is None else weights[parameter]
                parameters[parameter] = nn.Parameter(values.detach(), parameter.requires_grad)
            copy._parameters[name] = None if parameter is None else parameters[parameter]
            if type(module).__setattr__ is not nn.Module.__setattr__:
                # Torch's recurrent modules, for example, have a second list of their parameters.
                setattr(copy, name, copy._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = buffer.detach().to(device or buffer.device, copy=True)
            copy._buffers[name] = None if buffer is None else buffers[buffer]
    return Replica(copies[model], parameters)


def _require_no_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"the parameter {name!r} has hooks",
                expected="batch_norm: sync and dp compute gradients of copies of the parameters, without hooks",
                fix="read .grad after the step, or set batch_norm: microbatch and --strategy ddp",
                code="E_PARAMETER_HOOKS",
            )


def require_untouched(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a model whose replica used the model's own parameters.

    Raises:
        InputError: some of `parameters`, the model's own, have a gradient.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise InputError(
            "the forward of a replica used the model's own parameters",
            expected="under batch_norm: sync and dp, modules are attributes of their parents, not entries of a list, "
            "bound methods or compiled functions",
            fix="use nn.ModuleList or nn.ModuleDict, do not compile the model, or set batch_norm: microbatch and "
            "--strategy ddp",
            code="E_INCOMPATIBLE",
        )


Weights = dict[nn.Parameter, torch.Tensor]
Gradients = list[torch.Tensor | None]
# Loss and buffers of a microbatch, and the gradients of the trained parameters.
Computed = tuple[Loss, torch.Tensor | None, Gradients]


def _set_gradients(
    runner: StepRunner, batch: GlobalBatch, tree: MicrobatchTree, microbatch: Microbatch, gradients: Gradients
) -> None:
    """Pass the gradients of one microbatch to the strategy."""
    last = microbatch is batch.local_microbatches[-1]
    with runner.strategy.microbatch(tree, microbatch.number, last=last):
        for parameter, gradient in zip(runner.names, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _shared_autocast_cache() -> Iterator[None]:
    """Cast each weight once per group of microbatches, as on one device.

    All threads share one autocast cache, and a thread that leaves the outermost autocast context clears the cache.
    """
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


class DataParallelRunner(SequentialRunner):
    """Computes one microbatch per device of the rank at the same time, each on a replica, as `torch.nn.DataParallel`.

    All threads of a process share its random generators. A model that draws from them is computed sequentially, as on
    one device: the first group of microbatches shows whether the model draws, and is then computed again.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._devices = rank_devices(self.world)
        self._threads = Threads("samestep-device")
        self.is_sequential = bool(self.callbacks)  # callbacks expect one microbatch at a time

    def joins_check(self, batch: GlobalBatch) -> bool:
        return False  # a group of microbatches may be computed again

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        devices, microbatches = len(self._devices), batch.microbatches
        if devices > microbatches and not batch.begin.samples:  # a last batch may have fewer microbatches
            raise InputError(
                f"strategy dp has {devices} devices but the recipe has {microbatches} microbatches, so "
                f"{devices - microbatches} devices would be idle",
                expected="devices <= microbatches",
                fix=f"set strategy.devices: {microbatches}",
                code="E_TOO_MANY_RANKS",
            )
        total = None if self.is_sequential else self._concurrent(batch, position, save)
        if total is None:
            self.is_sequential = True
            return super().compute(batch, position, save=save)
        return total

    def _concurrent(self, batch: GlobalBatch, position: int, save: bool) -> torch.Tensor | None:
        """Compute the step with one thread per device; return None, with nothing changed, if the model draws."""
        tree, stats = MicrobatchTree(batch.microbatches, batch.size), LocalStats()
        weights = self._device_weights()
        self.buffers.begin(batch.microbatches)
        errors = one_value_errors(batch, self.world, is_shared=False)
        with self.generators.preserved(), self.undo_on_failure(), errors:
            before = generator_state()
            for first in range(0, len(batch.local_microbatches), len(self._devices)):
                group = batch.local_microbatches[first : first + len(self._devices)]
                computed = self._group(group, weights, batch, position)
                if generator_state() != before:
                    self.strategy.abandon()
                    return None
                for microbatch, (loss, buffers, gradients) in zip(group, computed, strict=True):
                    stats.add(microbatch.number, loss, buffers)
                    _set_gradients(self, batch, tree, microbatch, gradients)
            self.world.context.status.end_compute(len(batch.local_microbatches))
        return self.finish(tree, self.sum_stats(tree, stats, save))

    def _device_weights(self) -> list[Weights]:
        """Copy the weights to each device; the model's own device uses the same memory."""
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self.world.device))  # creates the scale at the first call
        parameters = list(self.model.parameters())
        return [{p: p.detach().to(device, non_blocking=True) for p in parameters} for device in self._devices]

    def _group(
        self, group: Sequence[Microbatch], weights: Sequence[Weights], batch: GlobalBatch, position: int
    ) -> list[Computed]:
        """Compute forward and backward of some microbatches at the same time, each on its own device."""
        futures: list[Future[Computed]] = []
        computed = []
        try:
            for number, microbatch in enumerate(group):
                task = partial(self._microbatch, number, microbatch, weights[number], batch, position)
                futures.append(self._threads.submit(number, partial(ThreadState(self._devices[number]).run, task)))
            wait(futures)
            while futures:
                computed.append(futures.pop(0).result())
            return computed
        except BaseException:
            self._threads.end()
            raise
        finally:
            futures.clear()  # an exception holds frames, which hold the graphs of microbatches
            torch.clear_autocast_cache()

    @_shared_autocast_cache()
    def _microbatch(
        self, number: int, microbatch: Microbatch, weights: Weights, batch: GlobalBatch, position: int
    ) -> Computed:
        replica = replicate(self.model, self._devices[number], weights)
        on_device = microbatch._replace(data=move(microbatch.data, self._devices[number]))
        _, loss = self.forward(replica.module, on_device, position, concurrent=True)
        buffers = self.buffers.read(microbatch.number, replica.module)
        copies = {replica.parameters[parameter]: name for parameter, name in self.names.items()}
        torch.autograd.backward(*self.roots(loss.sum, batch.size))
        require_untouched(list(self.names))
        self.require_gradients(copies)
        detached = Loss(loss.sum.detach(), loss.count)
        return detached, buffers, [None if copy.grad is None else copy.grad.to(self.world.device) for copy in copies]


class SyncBatchNormRunner(StepRunner):
    """Computes all microbatches in lockstep, each on a replica; gradients are reduced after the last microbatch."""

    buffers: ForwardState

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads = Threads("samestep-microbatch")
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._exchange: StatisticsExchange | None = None
        self._plan: list[int] = []  # of exchanges
        self._global_loss = GlobalLoss(self.forward, self.world.data)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        tree, stats = MicrobatchTree(batch.microbatches, batch.size), LocalStats()
        gradients: dict[int, Gradients] = {}

        def end_microbatch(microbatch: Microbatch, replica: Replica, loss: Loss, roots: Roots) -> None:
            stats.add(microbatch.number, loss, self.buffers.read(microbatch.number, replica.module))
            copies = {replica.parameters[parameter]: name for parameter, name in self.names.items()}
            torch.autograd.backward(*roots)
            require_untouched(list(self.names))
            self.require_gradients(copies, microbatch.number)
            gradients[microbatch.number] = [copy.grad for copy in copies]

        if self.forward.gathers and batch.size == 1:  # norm layers may raise on one rank, while others gather outputs
            raise InputError(
                "a batch of one sample with step.gather: global and step.batch_norm: sync",
                expected="at least 2 samples in each batch",
                fix="drop_last=True in samestep.loader (data.drop_last in a recipe), or another batch size",
                code="E_INCOMPATIBLE",
            )
        self.buffers.begin(batch.microbatches)
        with self.undo_on_failure(), one_value_errors(batch, self.world, is_shared=batch.size == 1):
            self._run(batch, tree, position, end_microbatch, self.callbacks)
            self.world.context.status.end_compute(len(batch.local_microbatches))
            for microbatch in batch.local_microbatches:
                _set_gradients(self, batch, tree, microbatch, gradients.pop(microbatch.number))
        return self.finish(tree, self.sum_stats(tree, stats, save))

    def bad_losses(self, batch: GlobalBatch, stats: StepStats) -> list[int]:
        """Return the microbatches with the first non-finite statistics: all others share them."""
        bad = self._global_loss.bad_microbatches() if self.forward.gathers else stats.bad_microbatches
        return self._first_bad(batch, "forward") or bad

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Return the microbatches with the first non-finite statistics, or those whose own gradient is not finite."""
        first_bad = self._first_bad(batch, "backward")
        if first_bad:
            return first_bad
        bad: list[int] = []

        def check_microbatch(microbatch: Microbatch, replica: Replica, loss: Loss, roots: Roots) -> None:
            if not has_finite_gradient(*roots, [replica.parameters[parameter] for parameter in self.names]):
                bad.append(microbatch.number)

        self._run(batch, MicrobatchTree(batch.microbatches, batch.size), position, check_microbatch)
        return flagged_by_any(bad, batch, self.world)

    def _run(
        self,
        batch: GlobalBatch,
        tree: MicrobatchTree,
        position: int,
        end: Callable[[Microbatch, Replica, Loss, Roots], None],
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Compute the forward of each microbatch of this rank and call `end`, in lockstep with all microbatches."""
        group = self._active_group(tree)
        computed: dict[int, LocalOutputs] = {}

        def global_loss(*_: torch.Tensor) -> OutputGradients:
            # Removed: graphs hold the tracks, which hold this function.
            entries = [computed.pop(microbatch.number) for microbatch in batch.local_microbatches]
            return self._global_loss.gradients(entries, batch, position, self.scaler)

        if not batch.local_microbatches:
            if self.forward.gathers:
                global_loss()
            return
        layers = norm_layers(self.model)
        width = 2 * max(layer.num_features for layer in layers.values())
        numbers = [microbatch.number for microbatch in batch.local_microbatches]
        exchange = StatisticsExchange(self.world, group, tree, numbers, list(layers), width, self._plan)
        self._exchange = exchange

        def on_track(microbatch: Microbatch, track: Track) -> None:
            replica = replicate(self.model)
            synchronize_layers(replica.module, track)
            for callback in callbacks:
                callback.begin_microbatch(microbatch)
            if self.forward.gathers:
                entry = computed[microbatch.number] = self.forward.outputs(
                    replica.module, microbatch, TRAINING, position
                )
                outputs, loss = entry.outputs, NO_LOSS
            else:
                outputs, loss = self.forward(replica.module, microbatch, position)
            for callback in callbacks:
                callback.end_microbatch(self.forward.with_targets(microbatch), outputs, loss)
            if self.forward.gathers:
                result: OutputGradients = track.exchange(exchange.end_of_forward(global_loss))
                end(microbatch, replica, result.loss_of(microbatch), result.roots(entry))
            else:
                end(microbatch, replica, loss, self.roots(loss.sum, batch.size))

        tasks = [partial(on_track, microbatch) for microbatch in batch.local_microbatches]
        run_in_lockstep(tasks, exchange, self.world.device, self._threads)
        self._plan = exchange.codes

    def _active_group(self, tree: MicrobatchTree) -> dist.ProcessGroup | None:
        """Return the group of the ranks with samples in `tree`, None for all ranks; a collective of all ranks."""
        covers = tree.covers(self.world.shares)
        if all(covers):
            return None
        ranks = tuple(rank for rank, cover in enumerate(covers) if cover)
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), timeout=self.world.timeout)
        return self._groups[ranks]

    def _first_bad(self, batch: GlobalBatch, direction: Direction) -> list[int]:
        """Return the microbatches with the first non-finite statistics, if these occurred in `direction`."""
        exchange = self._exchange
        is_first = batch.local_microbatches and exchange is not None and exchange.bad_direction == direction
        return flagged_by_any(exchange.bad if exchange is not None and is_first else [], batch, self.world)


def build_buffers(
    model: torch.nn.Module, rules: Mapping[str, Rule] | None, runner_class: type[StepRunner], *, is_whole: bool
) -> MicrobatchBuffers | ForwardState:
    """Return the rules for the state that a forward changes.

    Raises:
        InputError: the runner does not support the rules.
    """
    if runner_class is PipelineRunner:
        if rules:
            raise InputError(
                "buffers=... with a pipeline",
                "stages average their floating-point buffers and counters, and change no others",
                "use --strategy ddp, or remove buffers=...",
                code="E_INCOMPATIBLE",
            )
        return MicrobatchBuffers(model)
    state = ForwardState(model, rules, is_whole=is_whole)
    if state.declared_parameters and runner_class is not SequentialRunner:
        raise InputError(
            f"a rule for the parameter {state.declared_parameters[0]}",
            "under batch_norm: sync, gather: global and dp, microbatches computed together share the parameters",
            "write the parameter after engine.step, or remove these options",
            code="E_INCOMPATIBLE",
        )
    return state
