"""Strategy `dp`: the microbatches of one process on several devices, each on a replica, as in `nn.DataParallel`.

Sync batch norm computes on replicas too, in lockstep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from samestep.data.batch import GlobalBatch, Microbatch, move
from samestep.distributed.devices import rank_devices
from samestep.distributed.rng import generator_state
from samestep.engine.batch_norm_checks import one_value_errors
from samestep.engine.loss import Loss
from samestep.engine.microbatch_threads import Threads, ThreadState
from samestep.engine.model_changes import hooked_parameter
from samestep.engine.step_runner import SequentialRunner, StepRunner
from samestep.engine.step_stats import LocalStats
from samestep.errors import InputError
from samestep.reduce.tree import MicrobatchTree


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
    require_no_hooks(model)
    modules = list(model.modules())
    copies: dict[nn.Module, nn.Module] = {module: module._replicate_for_data_parallel() for module in modules}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in parameters:
                values = (parameter if weights is None else weights[parameter]).detach()
                if isinstance(module, nn.RNNBase):
                    values = values.data  # the module moves its copies on a GPU, which is no write to the parameters
                parameters[parameter] = nn.Parameter(values, parameter.requires_grad)
            copy._parameters[name] = None if parameter is None else parameters[parameter]
            if type(module).__setattr__ is not nn.Module.__setattr__:
                # Torch's recurrent modules, for example, have a second list of their parameters.
                setattr(copy, name, copy._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = buffer.detach().to(device or buffer.device, copy=True)
            copy._buffers[name] = None if buffer is None else buffers[buffer]
    return Replica(copies[model], parameters)


def require_no_hooks(model: nn.Module) -> None:
    """Refuse a model whose parameters have hooks.

    Raises:
        InputError: a parameter has.
    """
    if (name := hooked_parameter(model)) is not None:
        raise InputError(
            f"the parameter {name!r} has hooks",
            expected="batch_norm: sync and dp compute gradients of copies of the parameters, without hooks",
            fix="read .grad after the step, or set batch_norm: microbatch and --strategy ddp",
            code="E_PARAMETER",
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


def set_gradients(
    runner: StepRunner, batch: GlobalBatch, tree: MicrobatchTree, microbatch: Microbatch, gradients: Gradients
) -> None:
    """Pass the gradients of one microbatch to the strategy."""
    last = microbatch is batch.local_microbatches[-1]
    with runner.strategy.microbatch(tree, microbatch.number, last=last):
        for parameter, gradient in zip(runner.names, gradients, strict=True):
            parameter.grad = gradient


# Loss and buffers of a microbatch, and the gradients of the trained parameters.
Computed = tuple[Loss, torch.Tensor | None, Gradients]


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

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
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
                    set_gradients(self, batch, tree, microbatch, gradients)
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
