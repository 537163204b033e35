"""Engine: one optimizer step from one global batch, with the same result on every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.state import Training
from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.distributed.world import World
from samestep.engine.batch_statistics import one_value_error, warn_of_few_samples
from samestep.engine.build import build_components, set_modes, uses_batch_statistics
from samestep.engine.callbacks import Callback, Intervention, TrainingValues
from samestep.engine.consistency import enable_checks
from samestep.engine.evaluation import evaluate
from samestep.engine.learning_rate import Interval, ScheduleClock
from samestep.engine.loss import LossFunction
from samestep.engine.multi_loss import MultiLoss, as_step_loss
from samestep.engine.non_finite import non_finite_error
from samestep.engine.step_stats import StepResult, StepStats, reduce_requests
from samestep.errors import InputError
from samestep.metrics.metrics import Metrics, as_metrics


class Engine:
    """Optimizer steps and evaluations of a model.

    Args:
        model: trained in place and moved to the world's device.
        optimizer: any optimizer of torch, with exactly the model's trained parameters.
        loss: a loss of `torch.nn`; a function from outputs and targets to a `Loss(sum, count)`, or to a scalar, the
            mean over a microbatch; or a `MultiLoss`.
        world: the ranks, from `samestep.start()`.
        scheduler: any scheduler of torch; its state is a part of checkpoints.
        scheduler_interval: `step` or `epoch`, required with a scheduler: the scheduler is stepped after each optimizer
            step, or after the last step of each epoch. `ReduceLROnPlateau` is stepped by the loop.
        config: seed, reduction, precision, clipping and other options of a step.
        ema: decay of a moving average of the weights, used in evaluation; None for no average.
        check_every: steps between comparisons of the ranks' state, None for none; equal on every rank. If set, ranks
            also check that they issue the same steps, evaluations and collectives: see `docs/guides/runs.md`.
        metrics: metrics of training and the default of `evaluate`, which describes the possible values.
        callbacks: read-only hooks.

    Attributes:
        steps: number of steps done, skipped ones included; random states and schedule depend on it.
        averaged: the moving average of the weights, or None.
        local_parameters: this rank's parameters or shards of parameters.
        device_map: devices of the model's parts under the strategy `device_map`; None otherwise.
        scaler: the loss scaler of fp16, disabled otherwise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction | MultiLoss,
        *,
        world: World,
        scheduler: LRScheduler | None = None,
        scheduler_interval: Interval | None = None,
        config: StepConfig | None = None,
        check_every: int | None = None,
        ema: float | None = None,
        metrics: Metrics = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._name = world.context.collective_check.next_engine_name()
        with world.context.collective_check.operation(f"making {self._name}"):
            enable_checks(world, check_every)
        self.model, self.optimizer, self.scheduler, self.world, self.loss = model, optimizer, scheduler, world, loss
        self._schedule = ScheduleClock(scheduler, scheduler_interval, is_main=world.is_main)
        self.steps = 0
        self.config = config or StepConfig()
        self._metrics = metrics
        objects = as_metrics(deepcopy(metrics), ignore_index=as_step_loss(loss).ignore_index)
        self._training_values = TrainingValues(objects) if objects else None
        self._callbacks = (*world.context.callbacks, *callbacks, *filter(None, [self._training_values]))
        for callback in self._callbacks:
            if isinstance(callback, Intervention):
                self.config = callback.prepare(model, self.config)
        by_microbatch = self.config.batch_norm == "microbatch" and uses_batch_statistics(model)
        self._checks_samples = by_microbatch and world.is_main  # in the first step
        parts = build_components(model, optimizer, loss, world, self.config, check_every, ema, self._callbacks)
        self._components, self.scaler = parts, parts.runner.scaler
        self.averaged, self.local_parameters, self.device_map = parts.averaged, parts.local_parameters, parts.device_map
        for callback in self._callbacks:
            callback.engine_created(self)

    @property
    def training(self) -> Training:
        """The objects whose state a checkpoint contains."""
        average = self.averaged.tensors if self.averaged is not None else None
        return Training(self.model, self.optimizer, self.scheduler, self.scaler, average, self.local_parameters)

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self._components.runner.strategy.name

    def step(self, batch: GlobalBatch, *, save: bool = False) -> StepResult:
        """Compute one optimizer step from one global batch.

        Args:
            batch: the samples of the step.
            save: this rank requests a checkpoint of the state after the step; every rank receives `result.save`.

        Raises:
            NonFiniteError: loss or gradient is not finite and `non_finite` is `stop`; the state is unchanged.
            PeerLostError: another rank ended.
            UnusedParameterError: a trained parameter received no gradient.
            RankDesyncError: with `check_every`: another rank is about to do something else.
            RankMismatchError: with `check_every`: ranks hold different state; see `check`.
        """
        with self.world.context.collective_check.operation(f"{self._name}.step {self.steps + 1}"):
            self._components.consistency.begin_step(self.steps)
            result = self._step(batch, save)
            self._components.consistency.end_step(result.step)
            return result

    def _step(self, batch: GlobalBatch, save: bool) -> StepResult:
        runner, world = self._components.runner, self.world
        for callback in self._callbacks:
            callback.begin_step(self, batch)
        set_modes(self._components.modes)
        self.optimizer.zero_grad(set_to_none=True)
        runner.forward.begin_step(batch, world.data)
        if self._checks_samples:
            self._checks_samples = False
            warn_of_few_samples(batch)
        try:
            stats = runner.compute(batch, self.steps, save=save)
        except ValueError as error:
            if (explained := one_value_error(batch, error)) is None:
                raise
            raise explained from error
        if world.data.size < world.size:
            stats = reduce_requests(stats, world)
        self._divide_by_count(batch, stats)
        for callback in self._callbacks:
            callback.end_gradients(self)
        norm = self.local_parameters.total_norm()
        lr = float(self.optimizer.param_groups[0]["lr"])
        finite = not stats.bad_microbatches and math.isfinite(norm)
        if finite:
            self._update(batch, stats, norm)
        else:
            self._restore(batch, stats)
        # Every rank's scaler has processed the same gradients, so all ranks update the scale equally.
        self.scaler.update()
        self._schedule.end_step(batch, self.steps + 1)
        self.steps += 1
        result = StepResult(self.steps, stats.loss, stats.count, lr, float(norm), not finite, stats.stop, stats.save)
        for callback in self._callbacks:
            callback.end_step(self, result)
        return result

    def _divide_by_count(self, batch: GlobalBatch, stats: StepStats) -> None:
        """Correct the divisor of the gradients from the number of samples to the global count."""
        if stats.count != batch.size and stats.count > 0:
            gradients = [p.grad for p in self.local_parameters.names if p.grad is not None]
            torch._foreach_mul_(gradients, batch.size / stats.count)
        self.scaler.unscale_(self.optimizer)
        self.local_parameters.agree_on_overflow(self.scaler, self.optimizer, self.world)

    def _update(self, batch: GlobalBatch, stats: StepStats, norm: torch.Tensor) -> None:
        if self.config.clip_norm is not None:
            clip_grads_with_norm_(list(self.local_parameters.names), self.config.clip_norm, norm)
        self.scaler.step(self.optimizer)
        self._components.runner.buffers.write(stats.buffers / batch.filled)
        if self.averaged is not None:
            self.averaged.update(self.steps + 1)

    def _restore(self, batch: GlobalBatch, stats: StepStats) -> None:
        """Restore the state before the step, and raise if `non_finite` is `stop`."""
        self._components.runner.buffers.restore()
        # Under fp16, overflows of gradients are expected: the scaler reduces its scale.
        is_scaling = self.scaler.is_enabled() and not stats.bad_microbatches
        if self.config.non_finite == "stop" and not is_scaling:
            self.scaler.update()
            raise non_finite_error(batch, stats, self.steps, self._components.runner, self.local_parameters)

    def training_values(self) -> dict[str, float]:
        """Return mean `loss` and metrics of the steps since the last call, or since a resumption; a collective.

        They belong to the outputs of training: in training mode, before the update of the step.

        Raises:
            InputError: the engine has no `metrics`.
        """
        if self._training_values is None:
            raise InputError(
                "training_values was called on an engine without metrics",
                expected="metrics of training",
                fix='samestep.Engine(..., metrics=["accuracy"])',
                code="E_METRIC",
            )
        with self.world.context.collective_check.operation(f"{self._name}.training_values"):
            return self._training_values.take(self._components.outputs.world)

    def evaluate(self, batches: Iterable[GlobalBatch], metrics: Metrics | None = None) -> dict[str, float]:
        """Return `loss` (and its terms), `samples` and the metrics over `batches`, each sample counted once.

        Args:
            batches: evaluation data, such as a loader.
            metrics: names (`accuracy`, `top5`, `dice`, `f1`, `iou`, `perplexity`), metrics of torchmetrics, or objects
                with `name`, `update(outputs, targets)`, `compute(world)` and `reset()`; or a mapping from names to
                metrics of torchmetrics. None for the metrics of the engine. Named metrics ignore the same targets as
                the loss.

        Raises:
            InputError: a metric is unknown, cannot be summed over ranks, or does not support the outputs.
            RunError: the loss counts nothing.
        """
        values = self._evaluate(batches, metrics, until_stop=False)
        assert values is not None
        return values

    def evaluate_until_stop(self, batches: Iterable[GlobalBatch], metrics: Metrics = ()) -> dict[str, float] | None:
        """Like `evaluate`, but return None on every rank if a rank receives a stop request; metrics are then reset."""
        return self._evaluate(batches, metrics, until_stop=True)

    def _evaluate(
        self, batches: Iterable[GlobalBatch], metrics: Metrics | None, *, until_stop: bool
    ) -> dict[str, float] | None:
        averaged = self.averaged.in_place() if self.averaged is not None else nullcontext()
        outputs = self._components.outputs
        ignore_index = outputs.forward.loss.ignore_index
        objects = as_metrics(self._metrics if metrics is None else metrics, ignore_index=ignore_index)
        with self.world.context.collective_check.operation(f"{self._name}.evaluate"), averaged:
            values = evaluate(self.model, batches, objects, outputs, self.world, until_stop=until_stop)
        if values is not None:
            for callback in self._callbacks:
                callback.end_evaluation(self, values)
        return values

    def check(self) -> None:
        """Compare the state of all ranks now; a collective. Does nothing without `check_every`.

        Raises:
            RankMismatchError: parameters, buffers or optimizer state differ between ranks.
        """
        with self.world.context.collective_check.operation(f"{self._name}.check"):
            self._components.consistency.compare(self.steps)
