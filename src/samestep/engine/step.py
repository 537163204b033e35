"""The engine: one optimizer step from one global batch, the same on every number of ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.state import Training
from samestep.config import StepRules
from samestep.data.batch import GlobalBatch
from samestep.engine import finite
from samestep.engine.at_once import GradientsAtOnce, require_replicas
from samestep.engine.buffers import ShardedBuffers, set_modes, training_modes
from samestep.engine.drift import DriftCheck, begin_checks
from samestep.engine.ema import AveragedWeights
from samestep.engine.evaluation import Metric, evaluate
from samestep.engine.forward import Forward
from samestep.engine.gradients import ShardGradients
from samestep.engine.joint import JointGradients, has_joint_layers, require_whole_model
from samestep.engine.loss import LossFunction
from samestep.engine.observer import observers
from samestep.engine.pipelined import PipelineGradients, outputs_of, prepare_stages, require_stages
from samestep.engine.result import StepResult
from samestep.engine.switches import prepare, require_steady_scale
from samestep.engine.tally import Tally, agreed
from samestep.errors import InputError
from samestep.parallel.pieces import hand_over
from samestep.parallel.placed import require_meetings
from samestep.parallel.strategy import build_strategy, divide_model, move_to_devices
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World


class Engine:
    """Turns global batches into optimizer steps.

    Args:
        model: trained in place, moved to the world's device; its parameters must be the optimizer's.
        optimizer: any of torch's.
        loss: from outputs and targets to a `Loss(sum, count)`, or to a scalar that is the mean over a shard; or a
            `MultiLoss`.
        world: the ranks, from `samestep.start()`.
        scheduler: advanced once a step.
        rules: seed, reduction, clipping and so on.
        ema: decay of a moving average of the weights, with which evaluation is done; None for none.
        check_every: steps between comparisons of what ranks hold, or None for none; the same on every rank. Where it
            is set, ranks also call the roll before each step, evaluation and collective: see `docs/runs.md`.

    Attributes:
        steps: steps done so far, skipped ones included; what random states and schedule count.
        averaged: the moving average of the weights, if there is one.
        pieces: what this rank holds of the model's parameters.
        placement: where the parts of the model are, under the strategy `placed`; else None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        world: World,
        scheduler: LRScheduler | None = None,
        rules: StepRules | None = None,
        check_every: int | None = None,
        ema: float | None = None,
    ) -> None:
        self._call_name = world.roll_call.name_engine()
        with world.roll_call.during(f"making {self._call_name}"):
            begin_checks(world, check_every)
        self.model, self.optimizer, self.scheduler, self.world = model, optimizer, scheduler, world
        self.loss = loss
        self._observers = observers()
        self.rules = rules or StepRules()
        for observer in self._observers:
            self.rules = observer.prepare(model, self.rules)
        require_steady_scale(self.rules, world)
        self.steps = 0
        self._modes = training_modes(model)
        joins = self.rules.batch_norm == "sync" and has_joint_layers(self._modes)
        if joins:
            require_whole_model(world)
        whole = list(model.parameters())
        _require_same([parameter for parameter in whole if parameter.requires_grad], optimizer)
        gradients = _kind_of_gradients(world, self.rules, joins=joins)
        self.placement = move_to_devices(model, world)
        prepare(model, self.rules, world.device)
        self.pieces = divide_model(model, world)
        prepare_stages(self.pieces, self.rules)
        hand_over(optimizer, whole, self.pieces)
        self._names = self.pieces.names
        self._parameters = list(self._names)
        self.averaged = AveragedWeights(self.pieces.trained, ema) if ema is not None else None
        self._buffers = ShardedBuffers(model)
        self._forward = Forward(loss, self.rules, world.device)
        self._strategy = build_strategy(model, self.pieces, self.rules.reduction, world, together=joins)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.rules.precision == "fp16")
        computed = self._names if self._strategy.sums_late else self.pieces.own_names
        self._gradients = gradients(
            model, self._forward, self._strategy, self._buffers, self.scaler, computed, world, self._observers
        )
        self._outputs = outputs_of(self._strategy, self._forward, world)
        # Where ranks divide parameters there is nothing to compare: no two of them hold the same.
        compared = None if self.pieces.is_divided else check_every
        self._drift = DriftCheck(model, optimizer, world, compared, self.averaged)
        for observer in self._observers:
            observer.made(self)

    @property
    def training(self) -> Training:
        """The objects whose state a checkpoint holds."""
        average = self.averaged.tensors if self.averaged is not None else None
        return Training(self.model, self.optimizer, self.scheduler, self.scaler, average, self.pieces)

    @property
    def strategy(self) -> str:
        """The name of the strategy in use."""
        return self._strategy.name

    def step(self, batch: GlobalBatch, *, save: bool = False) -> StepResult:
        """One optimizer step from one global batch.

        Args:
            save: this rank wants a checkpoint of what the step leads to; every rank hears of it as `result.save`.

        Raises:
            NonFiniteError: loss or gradient is not finite, and the rules say `stop`; nothing was changed.
            PeerLostError: another rank went away.
            UnusedParameterError: a trained parameter took no part in the loss.
            RollCallError: ranks are checked, and another one is about to do something else.
            DriftError: ranks are checked, and do not hold the same; see `check`.
        """
        with self.world.roll_call.during(f"{self._call_name}.step {self.steps + 1}"):
            self._drift.begin_step(self.steps)
            result = self._step(batch, save)
            self._drift.end_step(result.step)
        return result

    def _step(self, batch: GlobalBatch, save: bool) -> StepResult:
        for observer in self._observers:
            observer.begin_step(self, batch)
        set_modes(self._modes)
        self.optimizer.zero_grad(set_to_none=True)
        self._forward.begin_step(batch, self.world.data)
        tally = self._gradients.compute(batch, self.steps, save=save)
        if self.world.data.size < self.world.size:
            tally = agreed(tally, self.world)
        self._divide(batch, tally)
        for observer in self._observers:
            observer.end_gradients(self)
        norm = self.pieces.total_norm()
        lr = float(self.optimizer.param_groups[0]["lr"])
        finite_step = not tally.bad_shards and math.isfinite(norm)
        if finite_step:
            if self.rules.clip_norm is not None:
                clip_grads_with_norm_(self._parameters, self.rules.clip_norm, norm)
            self.scaler.step(self.optimizer)
            self._buffers.write(tally.buffers / batch.filled)
            if self.averaged is not None:
                self.averaged.update(self.steps + 1)
        else:
            self._leave_out(batch, tally)
        # The scaler has seen the same gradients on every rank, so what it decides is one decision for all.
        self.scaler.update()
        self._advance_schedule()
        self.steps += 1
        result = StepResult(
            self.steps, tally.loss, tally.count, lr, float(norm), not finite_step, tally.stop, tally.save
        )
        for observer in self._observers:
            observer.end_step(self, result)
        return result

    def evaluate(self, batches: Iterable[GlobalBatch], metrics: Sequence[Metric] = ()) -> dict[str, float]:
        """`loss` (and its parts), `samples` and the metrics over `batches`, each sample counted once."""
        values = self._evaluate(batches, metrics, give_up=False)
        assert values is not None
        return values

    def evaluate_until_stop(
        self, batches: Iterable[GlobalBatch], metrics: Sequence[Metric] = ()
    ) -> dict[str, float] | None:
        """As `evaluate`; None, on every rank, if one of them was asked to end before it was through.

        Metrics are as if nothing had been counted then.
        """
        return self._evaluate(batches, metrics, give_up=True)

    def _evaluate(
        self, batches: Iterable[GlobalBatch], metrics: Sequence[Metric], *, give_up: bool
    ) -> dict[str, float] | None:
        averaged = self.averaged.in_place() if self.averaged is not None else nullcontext()
        with self.world.roll_call.during(f"{self._call_name}.evaluate"), averaged:
            values = evaluate(
                self.model, batches, metrics, self._forward, self.world, give_up=give_up, outputs=self._outputs
            )
        if values is not None:
            for observer in self._observers:
                observer.end_evaluation(self, values)
        return values

    def check(self) -> None:
        """Compare what ranks hold now, on every rank; does nothing without `check_every`.

        Raises:
            DriftError: parameters, buffers or optimizer state are not the same bits on every rank.
        """
        with self.world.roll_call.during(f"{self._call_name}.check"):
            self._drift.compare(self.steps)

    def _divide(self, batch: GlobalBatch, tally: Tally) -> None:
        if tally.count != batch.size and tally.count > 0:
            torch._foreach_mul_(self._gradient_list(), batch.size / tally.count)
        self.scaler.unscale_(self.optimizer)
        self.pieces.agree_on_overflow(self.scaler, self.optimizer, self.world)

    def _leave_out(self, batch: GlobalBatch, tally: Tally) -> None:
        """Undo what the step did so far, and end the run if the rules say so."""
        self._buffers.restore()
        # Under fp16 a gradient that overflows is the scaler's daily business, not a fault.
        is_scaling = self.scaler.is_enabled() and not tally.bad_shards
        if self.rules.non_finite == "stop" and not is_scaling:
            self.scaler.update()
            raise self._non_finite(batch, tally)

    def _advance_schedule(self) -> None:
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # Said when the first update was left out; the schedule counts such steps on purpose.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.scheduler.step()

    def _non_finite(self, batch: GlobalBatch, tally: Tally) -> Exception:
        step = self.steps + 1
        if tally.bad_shards:
            return finite.bad_loss(step, batch, tally, self._gradients.bad_losses(batch, tally))
        mine = [name for p, name in self._names.items() if p.grad is not None and not finite.is_finite([p.grad])]
        bad = list(dict.fromkeys(chain(*all_gather(mine, self.world)))) if self.pieces.is_divided else mine
        return finite.bad_gradient(step, batch, bad, self._gradients.bad_gradients(batch, self.steps))

    def _gradient_list(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _kind_of_gradients(world: World, rules: StepRules, *, joins: bool) -> type[ShardGradients]:
    """What computes the shards of this rank: one after another, in lockstep, or as many at once as it has devices."""
    if world.strategy.name == "dp":
        require_replicas(rules, joins=joins)
        return GradientsAtOnce
    if world.layout.pipeline > 1:
        require_stages(rules, world)
        return PipelineGradients
    if joins and world.strategy.name == "placed":
        require_meetings(world)
    return JointGradients if joins else ShardGradients


def _require_same(parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that moves other parameters than those whose gradients are reduced."""
    held: set[Any] = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if held != set(parameters):
        missing, foreign = len(set(parameters) - held), len(held - set(parameters))
        raise InputError(
            f"{missing} trained parameters of the model are not the optimizer's, and {foreign} of the optimizer's "
            "are not the model's",
            rule="the optimizer holds exactly the model's parameters that require a gradient",
            do="build it from model.parameters(); freeze what should not move by requires_grad_(False)",
        )
