"""Engine: one optimizer step from one global batch, with the same result on every number of ranks.

Decisions: docs/decisions/own-loops.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import torch
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.state import Training
from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch
from samestep.data.joint_batch import Batches, joint_batch
from samestep.distributed.devices import value_on_host
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import ModeWarnings
from samestep.engine.buffer_rules import Rule
from samestep.engine.build import Components, build_components
from samestep.engine.callbacks import Callback, Intervention, TrainingValues
from samestep.engine.consistency import facts_of_step, require_equal_interval, settings_of
from samestep.engine.evaluation import evaluate_batches
from samestep.engine.learning_rate import Interval, ScheduleClock
from samestep.engine.loss import LossFunction, as_step_loss
from samestep.engine.microbatch_forward import TRAINING, ForwardFunction
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.non_finite import ends_run, non_finite_error
from samestep.engine.step_runner import StepRunner
from samestep.engine.step_stats import StepResult, counts_of, reduce_requests
from samestep.errors import InputError
from samestep.metrics.metrics import Metrics, as_metrics
from samestep.microbatches import most_owned
from samestep.strategies.local_parameters import closure_error


class Engine:
    """Optimizer steps and evaluations of a model.

    Args:
        model: trained in place and moved to the world's device.
        optimizer: any optimizer of torch, with exactly the model's trained parameters.
        loss: a loss of `torch.nn`; a function from outputs and targets to a `Loss(sum, count)`, or to a scalar, the
            mean over a microbatch; or a `MultiLoss`. None if every step has a forward function. With
            `StepConfig(gather="global")`, the function receives the outputs and targets of the whole global batch.
        world: the ranks, from `samestep.start()`.
        scheduler: any scheduler of torch; its state is a part of checkpoints.
        scheduler_interval: `step` or `epoch`, required with a scheduler: the scheduler is stepped after each optimizer
            step, or after the last step of each epoch. `ReduceLROnPlateau` is stepped by the loop.
        config: seed, reduction, precision, clipping and other options of a step.
        ema: decay of a moving average of the weights, used in evaluation; None for no average.
        check_every: steps between comparisons of the ranks' state, None for none; equal on every rank.
        metrics: metrics of training and the default of `evaluate`, which describes the possible values.
        callbacks: read-only hooks.
        buffers: rules for buffers that a training forward changes, and for frozen parameters that it writes, by shell
            patterns of their names: `mean`, `equal`, `last` or `sum`; see `docs/concepts/buffers.md`.

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
        loss: LossFunction | MultiLoss | None = None,
        *,
        world: World,
        scheduler: LRScheduler | None = None,
        scheduler_interval: Interval | None = None,
        config: StepConfig | None = None,
        check_every: int | None = None,
        ema: float | None = None,
        metrics: Metrics = (),
        callbacks: Sequence[Callback] = (),
        buffers: Mapping[str, Rule] | None = None,
    ) -> None:
        self.config = config or StepConfig()
        self._name = world.context.collective_check.next_engine_name()
        self._index = world.context.engine_numbers.add()
        self._number: int | None = None  # until the first step
        settings = settings_of(self.config, optimizer, loss)
        with world.context.collective_check.operation(f"making {self._name}", settings):
            require_equal_interval(world, check_every)
        self.model, self.optimizer, self.scheduler, self.world, self.loss = model, optimizer, scheduler, world, loss
        self._schedule = ScheduleClock(scheduler, scheduler_interval, is_main=world.is_main)
        self.steps = 0
        self._most_owned = 0  # microbatches of a rank in the present step
        self._metrics = metrics
        objects = as_metrics(deepcopy(metrics), ignore_index=as_step_loss(loss).ignore_index)
        self._training_values = TrainingValues(objects) if objects else None
        self._callbacks = (*world.context.callbacks, *callbacks, *filter(None, [self._training_values]))
        for callback in self._callbacks:
            if isinstance(callback, Intervention):
                self.config = callback.prepare(model, self.config)
        self._warnings = ModeWarnings(self.config, is_main=world.is_main)
        self._is_verified = any(isinstance(callback, Intervention) for callback in self._callbacks)
        if self._is_verified:  # `samestep verify` finds the cause of differences itself
            self._callbacks = tuple(callback for callback in self._callbacks if not callback.repeats_microbatches)
        self._build = partial(
            build_components, model, optimizer, loss, world, self.config, check_every, ema, self._callbacks, buffers
        )
        self._set_components(self._build())
        for callback in self._callbacks:
            callback.engine_created(self)

    def _set_components(self, parts: Components) -> None:
        parts.runner.forward.engine_number = self.number
        self._components, self.scaler = parts, parts.runner.scaler
        self.averaged, self.local_parameters, self.device_map = parts.averaged, parts.local_parameters, parts.device_map

    def _refresh(self) -> None:
        """Adapt to parameters that the script added, replaced, froze or unfroze; a collective if there are any."""
        if not self._components.state.is_current():
            self._set_components(self._build(self._components))

    @property
    def training(self) -> Training:
        """The objects whose state a checkpoint contains."""
        self._refresh()
        average = self.averaged.tensors if self.averaged is not None else None
        return Training(self.model, self.optimizer, self.scheduler, self.scaler, average, self.local_parameters)

    @property
    def number(self) -> int:
        """Number among engines that step by turns, from 0; random states depend on it from the first step."""
        return self._number or 0

    @number.setter
    def number(self, number: int) -> None:
        self._number = self._components.runner.forward.engine_number = number

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self._components.runner.strategy.name

    def step(self, batch: Batches, *, forward: ForwardFunction | None = None, save: bool = False) -> StepResult:
        """Compute one optimizer step from one global batch.

        Args:
            batch: the samples of the step; or batches of several loaders as a tuple or mapping, such as those of `zip`.
                The forward function then receives a tuple or mapping of their data, and the positions of all move.
            forward: function from the model and the data of a microbatch, of any structure, to a `Loss(sum, count)`, a
                scalar, the mean over the microbatch, or a mapping with one of them as `loss`. Other numbers of the
                mapping are returned as `result.values`; `outputs` and `targets` are for metrics. It calls the model
                that it receives. None calls model and loss with inputs and targets. With `gather: global`, a mapping
                with `outputs` and `targets` for the loss of the engine, and without `loss`.
            save: this rank requests a checkpoint of the state after the step; every rank receives `result.save`.

        Raises:
            NonFiniteError: loss or gradient is not finite and `non_finite` is `stop`; the state is unchanged.
            PeerLostError: another rank ended.
            UnusedParameterError: a trained parameter received no gradient.
            RankDesyncError: another rank is about to do something else.
            RankMismatchError: ranks have different batches, datasets or settings, or hold different state; see `check`.
            WitnessError: a callback `Witness` found other bits in a repeated microbatch; the state is unchanged.
        """
        if not isinstance(batch, GlobalBatch):
            batch = joint_batch(batch, has_forward=forward is not None)
        is_current = self._components.state.is_current()
        facts = {}
        if self.world.size > 1:
            facts = facts_of_step(batch, self.optimizer, is_current=is_current, is_verified=self._is_verified)
        joins = is_current and self._components.runner.joins_check(batch, has_forward=forward is not None)
        messages = (self._index, batch.microbatches, batch.size, forward is None) if joins else None
        check = self.world.context.collective_check
        with check.operation(f"{self._name}.step {self.steps + 1}", facts, messages=messages):
            if not is_current:
                self._refresh()
            self._components.consistency.begin_step(self.steps)
            self._set_forward(forward)
            number = self.world.context.engine_numbers.step(self._index)
            self.number = number if self._number is None else self._number
            self._most_owned = most_owned(batch.microbatches, self.world.data.shares)
            result = self._step(batch, save)
            self._components.consistency.end_step(result.step)
            return result

    def seed_forward(self, microbatch: int) -> None:
        """Seed the generators for the training forward of a microbatch, as the step does; for a loop outside of it."""
        self._components.runner.forward.context(TRAINING, self.steps, microbatch)

    def _set_forward(self, function: ForwardFunction | None) -> None:
        runner = self._components.runner
        if function is not None and self.world.mesh_shape.pipeline > 1:
            raise InputError(
                f"a forward function with the mesh {self.world.mesh_shape.name}",
                expected="a pipeline divides the forward of the model itself",
                fix="use --strategy ddp or fsdp, or pairs (inputs, targets) without a forward function",
                code="E_INCOMPATIBLE",
            )
        runner.forward.function = function

    @property
    def step_runner(self) -> StepRunner:
        """Computes the microbatches of this rank; another object after parameters were added or replaced."""
        return self._components.runner

    @property
    def separate_reason(self) -> str | None:
        """Reason for which `merge: auto` computed the microbatches of a rank one after another in the last step."""
        return self._components.runner.separate_reason if self._most_owned > 1 else None

    def _step(self, batch: GlobalBatch, save: bool) -> StepResult:
        runner, world = self._components.runner, self.world
        for callback in self._callbacks:
            callback.begin_step(self, batch)
        self.optimizer.zero_grad(set_to_none=True)
        runner.forward.begin_step(batch, world.data)
        self._warnings.begin_step(self.model, batch)
        total = runner.compute(batch, self.steps, save=save)
        if world.data.size < world.size:
            reduce_requests(batch.microbatches, total, world)
        self.local_parameters.align_gradients(self.optimizer)
        self._divide_by_count(batch, counts_of(batch.microbatches, total).sum())
        for callback in self._callbacks:
            callback.end_gradients(self)
        norm = self.local_parameters.total_norm()
        stats = runner.read(batch, total, norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        finite = stats.is_finite
        if finite:
            self._update(norm)
        else:
            runner.buffers.restore()
            if ends_run(self.config, stats, self.scaler):
                self.scaler.update()
                raise non_finite_error(batch, stats, self.steps, runner, self.local_parameters)
        # Every rank's scaler has processed the same gradients, so all ranks update the scale equally.
        self.scaler.update()
        self._schedule.end_step(batch, self.steps + 1)
        self.steps += 1
        if batch.source is not None:
            batch.source.end_step(batch, stop=stats.stop)
        values = runner.forward.means()
        result = StepResult(
            self.steps, stats.loss, stats.count, lr, stats.grad_norm, not finite, stats.stop, stats.save, values
        )
        for callback in self._callbacks:
            callback.end_step(self, result)
        return result

    def _divide_by_count(self, batch: GlobalBatch, count: torch.Tensor) -> None:
        """Correct the divisor of the gradients from the number of samples to the global count, on the device."""
        # Not `batch.size / count`, which torch computes as a product with the reciprocal. Without a count, gradients
        # are zero, and stay so.
        if value_on_host(count) != batch.size:  # a factor of one leaves all bits
            factor = (count.new_full((), batch.size) / count).nan_to_num_(nan=math.nan, posinf=1.0)
            self.local_parameters.scale_gradients(factor)
        self.scaler.unscale_(self.optimizer)
        self.local_parameters.agree_on_overflow(self.scaler, self.optimizer, self.world)

    def _update(self, norm: torch.Tensor) -> None:
        if self.config.clip_norm is not None:
            # The formula of `torch.nn.utils.clip_grad_norm_`.
            self.local_parameters.scale_gradients((self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        try:
            self.scaler.step(self.optimizer)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if "closure" not in str(error):
                raise
            raise closure_error(self.optimizer) from error
        self._components.runner.buffers.commit()
        if self.averaged is not None:
            self.averaged.update(self.steps + 1)

    def training_values(self) -> dict[str, float]:
        """Return mean `loss` and metrics of the steps since the last call, or since a resumption; a collective.

        They belong to the outputs of training: in training mode, before the update of the step. Skipped steps are left
        out, except by metric objects of your own.

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

    def evaluate(
        self,
        batches: Iterable[Batches],
        metrics: Metrics | None = None,
        *,
        forward: ForwardFunction | None = None,
    ) -> dict[str, float]:
        """Return `loss` (and its terms), `samples` and the metrics over `batches`, each sample counted once.

        Args:
            batches: evaluation data, such as a loader.
            metrics: names (`accuracy`, `top5`, `dice`, `f1`, `iou`, `perplexity`), metrics of torchmetrics, functions
                from outputs and targets to one value per sample or to a sum and a count, or objects with `name`,
                `update(outputs, targets)`, `compute(world)` and `reset()`; or a mapping from names to metrics of
                torchmetrics and functions. None for the metrics of the engine. Named metrics ignore the same targets
                as the loss.
            forward: as in `step`.

        Raises:
            InputError: a metric is unknown, cannot be summed over ranks, or does not support the outputs.
            RunError: the loss counts nothing.
        """
        values = self._evaluate(batches, metrics, forward, until_stop=False)
        assert values is not None
        return values

    def evaluate_until_stop(self, batches: Iterable[Batches], metrics: Metrics = ()) -> dict[str, float] | None:
        """Like `evaluate`, but return None on every rank if a rank receives a stop request; metrics are then reset."""
        return self._evaluate(batches, metrics, until_stop=True)

    def _evaluate(
        self,
        batches: Iterable[Batches],
        metrics: Metrics | None,
        forward: ForwardFunction | None = None,
        *,
        until_stop: bool,
    ) -> dict[str, float] | None:
        averaged = self.averaged.in_place() if self.averaged is not None else nullcontext()
        outputs = self._components.outputs
        ignore_index = outputs.forward.loss.ignore_index
        objects = as_metrics(self._metrics if metrics is None else metrics, ignore_index=ignore_index)
        self._set_forward(forward)
        with self.world.context.collective_check.operation(f"{self._name}.evaluate"), averaged:
            values = evaluate_batches(self.model, batches, objects, outputs, self.world, until_stop=until_stop)
        if values is not None:
            for callback in self._callbacks:
                callback.end_evaluation(self, values)
        return values

    def check(self) -> None:
        """Compare the state of all ranks now; a collective.

        Raises:
            RankMismatchError: parameters, buffers or optimizer state differ between ranks.
        """
        with self.world.context.collective_check.operation(f"{self._name}.check"):
            self._refresh()
            self._components.consistency.compare(self.steps)
