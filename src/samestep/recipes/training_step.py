"""Steps and evaluations of a recipe, around a model of `samestep.parallel`.

Decisions: docs/decisions/recipes.md
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.contents import SavedParameters, Training
from samestep.config import Precision, Recipe
from samestep.data.batch import channels_last, move
from samestep.distributed.device_reads import device_reads
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.distributed.world import World
from samestep.errors import DataError, InputError, RunError
from samestep.metrics.metrics import Accuracy, CountMetric, LossMetric, channels_of
from samestep.microbatches import microbatch_bounds
from samestep.parallelize import any_rank, no_sync
from samestep.recipes.bad_samples import RecipeBatch, parts_of
from samestep.recipes.loss import RecipeLoss, first_batch, non_finite_error
from samestep.recipes.optimizers import decides_on_device, step_if
from samestep.strategies.divided_parameters import full_tensor


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the batch, before the update.
        weight: weight of the loss in the mean of an epoch: samples, or targets.
        lr: learning rate of the first parameter group in this step.
        grad_norm: 2-norm of the gradient, before clipping.
        skipped: the update was skipped because of a non-finite loss or gradient.
        hits: correct and counted targets of the batch for each accuracy.
    """

    step: int
    loss: float
    weight: float
    lr: float
    grad_norm: float
    skipped: bool
    hits: torch.Tensor


class Driver:
    """Trains and evaluates a model on whole batches; every rank calls the same methods.

    Args:
        model: result of `samestep.parallel`, on the device of this rank.
        optimizer: optimizer of the model.
        loss: loss of the recipe.
        world: the ranks.
        recipe: numbers and options of a step.
        scheduler: stepped after each step.
        parameters: parameters on this rank.
        accuracies: metrics that are also counted in training.

    Attributes:
        accuracies: metrics that are also counted in training.
        local_parameters: parameters on this rank.
        steps: number of steps done, skipped ones included; random states and schedule depend on it.
        scaler: the loss scaler of fp16, disabled otherwise.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: RecipeLoss,
        *,
        world: World,
        recipe: Recipe,
        scheduler: LRScheduler,
        parameters: SavedParameters,
        accuracies: Sequence[Accuracy] = (),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.world = world
        self.local_parameters = parameters
        self.accuracies = accuracies
        self.steps = 0
        is_half = recipe.step.precision == "fp16"
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=is_half)
        self._decides_on_device = decides_on_device(optimizer)
        self._loss = loss
        self._recipe = recipe
        self._config = recipe.step
        self._has_computed = False
        self._parts = recipe.accumulate
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average: AveragedWeights | None = None
        if recipe.ema is not None:
            here = {name: p for name, p in self._trained.items() if parameters.has(name)}
            self._average = AveragedWeights(here, recipe.ema.decay)
        self._buffers = list(model.buffers())
        # Copies from before a step, which can be refused after its forward has changed buffers.
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]

    @property
    def training(self) -> Training:
        """The objects with state in a checkpoint."""
        average = None if self._average is None else self._average.tensors
        return Training(
            self.model, self.optimizer, self.scheduler, self.scaler, average, self.local_parameters
        )

    # --- training --------------------------------------------------------------------------------

    def step(self, batch: RecipeBatch) -> StepResult:
        """Compute one optimizer step from one batch.

        Raises:
            NonFiniteError: loss or gradient is not finite and `non_finite` is `stop`; parameters
                are unchanged.
        """
        self.world.session.status.heartbeat()
        copy_tensors(self._saved_buffers, self._buffers)
        self.optimizer.zero_grad(set_to_none=True)
        # Random numbers of a step are a function of its number, so that a resumed run has the same.
        seed = derive_seed("shard", self._config.seed, self.steps, 0)
        seed_generators(seed, self.world.device)
        data = self.on_device(batch)
        loss, weight, hits = self._backward(data, len(batch.samples))
        self.scaler.unscale_(self.optimizer)  # clipping needs gradients in their own scale
        norm = self._clipped_norm()
        rate = float(self.optimizer.param_groups[0]["lr"])
        numbers = torch.stack([loss.double(), norm.double(), weight.double(), *hits.double()])
        if self._decides_on_device:
            step_if(self.optimizer, numbers[:2].isfinite().all())
        # The only wait for the device in a step.
        values: list[float] = device_reads.values(numbers)
        is_finite = math.isfinite(values[0]) and math.isfinite(values[1])
        # Not by the scaler, which would read its flags: a finite norm has no overflow in it.
        if is_finite and not self._decides_on_device:
            self.optimizer.step()
        if not is_finite:
            copy_tensors(self._buffers, self._saved_buffers)
            self._require_skip(data, batch.samples, is_loss_finite=math.isfinite(values[0]))
        elif self._average is not None:
            self._average.update(self.steps + 1)
        # After a skipped step too: the scale becomes smaller.
        self.scaler.update()
        with warnings.catch_warnings():
            # Raised if the first update was skipped; the schedule counts skipped steps on purpose.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.scheduler.step()
        self.steps += 1
        loss_value, norm_value, weight_value, *counts = values
        hits = torch.tensor(counts, dtype=torch.float64).view(-1, 2)
        skipped = not is_finite
        return StepResult(self.steps, loss_value, weight_value, rate, norm_value, skipped, hits)

    @property
    def ignore_index(self) -> int:
        """Value of the targets that are not counted."""
        return self._loss.ignore_index

    def on_device(self, batch: RecipeBatch) -> tuple[Any, Any]:
        """Return inputs and targets of a batch on the device of this rank."""
        data = move(batch.data, self.world.device)
        inputs, targets = _pair_of(data)
        if self._config.channels_last:
            inputs = channels_last(inputs)
        return inputs, targets

    def _backward(
        self, data: tuple[Any, Any], samples: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the gradients of a batch, part after part; return loss, weight and hits."""
        if self._parts == 1:
            outputs, losses = self.losses(*data)
            hits = self._hits(outputs, data[1])
            self.scaler.scale(losses["loss"]).backward()
            return losses["loss"].detach(), self._weight(data[1], samples), hits
        parts = parts_of(data, samples, self._parts)
        sizes = [stop - start for start, stop in microbatch_bounds(samples, len(parts))]
        weights = [self._weight(part[1], size) for part, size in zip(parts, sizes, strict=True)]
        total = torch.stack(weights).sum()
        terms = []
        counts = []
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            # Ranks add their gradients once, in the backward of the last part.
            with nullcontext() if number == len(parts) else no_sync(self.model):
                outputs, losses = self.losses(*part)
                counts.append(self._hits(outputs, part[1]))
                loss = losses["loss"] * (weight / total).to(losses["loss"].dtype)
                self.scaler.scale(loss).backward()
            terms.append(loss.detach())
        return torch.stack(terms).sum(), total, torch.stack(counts).sum(dim=0)

    @torch.no_grad()
    def _hits(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return correct and counted targets for each accuracy, one after the other.

        Zeros if the targets are no classes, as after mixup.
        """
        channels = channels_of(outputs, targets)
        if channels is None or not self.accuracies:
            return torch.zeros(2 * len(self.accuracies), device=self.world.device)
        return torch.cat(
            [
                one.count(outputs, targets, targets != one.ignore_index, channels)
                for one in self.accuracies
            ]
        )

    def losses(self, inputs: Any, targets: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the outputs of the model, and the losses of the whole batch by name.

        Raises:
            InputError: model, loss and data do not fit each other, in the first call.
        """
        with autocast(self._config.precision, self.world.device):
            if self._has_computed:
                outputs = call_model(self.model, inputs)
                return outputs, self._loss(outputs, targets)
            model, loss = (f"{one.name!r}" for one in (self._recipe.model, self._recipe.loss))
            with first_batch(f"model {model}", inputs):
                outputs = call_model(self.model, inputs)
            with first_batch(f"loss {loss} of model {model}", (outputs, targets)):
                losses = self._loss(outputs, targets)
        if torch.is_grad_enabled() and not losses["loss"].requires_grad:
            raise InputError(
                f"the loss {loss} of model {model} has no gradient",
                expected="a loss that depends on trained parameters",
                fix="return outputs and losses without detach(), item() or integer types",
                code="E_SHAPE",
            )
        self._has_computed = True
        return outputs, losses

    def _weight(self, targets: Any, samples: int) -> torch.Tensor:
        weight = self._loss.weight(targets, samples)
        return torch.as_tensor(weight, dtype=torch.float64).to(self.world.device, non_blocking=True)

    def _clipped_norm(self) -> torch.Tensor:
        limit = self._config.clip_norm
        if limit is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), limit)
        else:
            gradients = [p.grad for p in self._trained.values() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        # To the device: without gradients, torch returns a zero on the CPU.
        return full_tensor(norm).to(self.world.device)

    def _require_skip(
        self, data: tuple[Any, Any], samples: torch.Tensor, *, is_loss_finite: bool
    ) -> None:
        """Require that a step that is not finite is skipped; a collective.

        Raises:
            NonFiniteError: such a step ends the run.
            RankMismatchError: the step is finite on another rank.
        """
        # On another rank the step may be finite: its next word meets this one, and would not meet a
        # gather.
        place = f"a loss or gradient of step {self.steps + 1} that is not finite"
        is_loss_finite = not any(any_rank(self.world, not is_loss_finite, place=place))
        # Under fp16, overflows of gradients are expected: the scaler reduces its scale.
        is_scaling = self.scaler.is_enabled() and is_loss_finite
        if self._config.non_finite == "stop" and not is_scaling:
            self.model.eval()
            raise non_finite_error(
                data,
                samples.tolist(),
                self._trained,
                loss_of=lambda inputs, targets: self.losses(inputs, targets)[1]["loss"],
                world=self.world,
                step=self.steps + 1,
                is_loss_finite=is_loss_finite,
            )

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(
        self,
        batches: Iterable[RecipeBatch],
        metrics: Sequence[CountMetric | LossMetric],
        *,
        until_stop: bool = False,
        is_trial: bool = False,
    ) -> dict[str, float] | None:
        """Return `loss`, other means of the loss function, `samples` and every metric.

        With `until_stop`, return None on every rank if a rank receives a stop request. With
        `is_trial`, the batches need not have values, and the result has the names alone.

        Raises:
            RunError: the loss counts nothing.
        """
        counting = [metric for metric in metrics if not isinstance(metric, LossMetric)]
        sums: dict[str, torch.Tensor] = {}
        weights = []
        samples = 0
        with self.evaluating():
            for batch in batches:
                if batch.data is None:  # no sample can be used
                    continue
                if until_stop and any(any_rank(self.world, self.world.stop_requested)):
                    for metric in counting:
                        metric.reset()
                    return None
                inputs, targets = self.on_device(batch)
                outputs, losses = self.losses(inputs, targets)
                weights.append(self._weight(targets, len(batch.samples)))
                for name, loss in losses.items():
                    # A mean over nothing is NaN.
                    term = (loss.double() * weights[-1]).where(weights[-1] > 0, 0.0)
                    sums[name] = sums[name] + term if name in sums else term
                for metric in counting:
                    surroundings: AbstractContextManager[None] = nullcontext()
                    if is_trial:
                        surroundings = first_batch(f"metric {metric.name!r}", (outputs, targets))
                    with surroundings:
                        metric.update(outputs, targets)
                samples += len(batch.samples)
                self.world.session.status.heartbeat()
        if is_trial:
            self._has_computed = False  # the first step also checks gradients
            for metric in counting:
                metric.reset()
            return dict.fromkeys([*sums, *(metric.name for metric in metrics)], math.nan)
        values: dict[str, float] = {**_means(sums, weights), "samples": samples}
        for one in metrics:
            if isinstance(one, LossMetric):
                values[one.name] = one.function(values["loss"])
            else:
                values[one.name] = one.compute()
        return values

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate with averaged weights if there are any; restore modes and random states."""
        averaged = nullcontext() if self._average is None else self._average.in_place()
        modes = [(module, module.training) for module in self.model.modules()]
        device = self.world.device
        with averaged, torch.no_grad(), preserved_generators(device):
            # Without the step: `samestep eval` draws as the evaluations in training do.
            seed_generators(derive_seed("evaluation", self._config.seed, 0, 0), device)
            self.model.eval()
            try:
                yield
            finally:
                for module, training in modes:  # parents first: their method sets the children too
                    if module.training is not training:
                        module.train(training)


def _means(sums: Mapping[str, torch.Tensor], weights: list[torch.Tensor]) -> dict[str, float]:
    """Return sums of losses divided by the sum of the weights; this waits for the device."""
    total = device_reads.values(torch.stack(weights).sum()) if weights else 0.0
    if not total:
        raise RunError(
            "the loss counted nothing in evaluation",
            fix="check for ignored targets",
            code="E_SHAPE",
        )
    numbers = device_reads.values(torch.stack(list(sums.values())))
    return {name: number / total for name, number in zip(sums, numbers, strict=True)}


class AveragedWeights:
    """Exponential moving average of trained parameters, for evaluation.

    Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992). The update is
    elementwise on weights that are equal on every rank, so the average has the same bits.

    Args:
        trained: this rank's trained parameters by name.
        decay: fraction of the average that remains at each step, between 0 and 1; smaller in the
            first steps, so that the initial weights lose their influence soon.

    Attributes:
        tensors: the average, by parameter name.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        self._trained = list(trained.values())
        self.tensors = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._decay = decay

    def update(self, step: int) -> None:
        """Update the average with the weights after step number `step`, from 1."""
        # The schedule of TensorFlow's ExponentialMovingAverage with `num_updates`.
        decay = min(self._decay, (1 + step) / (10 + step))
        current = [parameter.detach() for parameter in self._trained]
        if current:  # a rank can have no trained parameters; torch refuses empty lists
            torch._foreach_lerp_(list(self.tensors.values()), current, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the average for the duration of the block."""
        current = [parameter.detach() for parameter in self._trained]
        own = [weights.clone() for weights in current]
        copy_tensors(current, list(self.tensors.values()))
        try:
            yield
        finally:
            copy_tensors(current, own)


def copy_tensors(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy `values` to `to`.

    One call per pair of types: torch raises on empty lists, CUDA copies lists of several types one
    tensor at a time, and torch 2.10 writes all of them as the type of the first
    (https://github.com/pytorch/pytorch/issues/173383).
    """
    groups: dict[tuple[torch.dtype, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(to, values, strict=True):
        targets, sources = groups.setdefault((target.dtype, value.dtype), ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context of a precision."""
    if (dtype := _AUTOCAST[precision]) is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    # Also `fp32`: the autocast of a caller would change the precision of the recipe.
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def call_model(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module`; a mapping or a tuple of inputs is unpacked into arguments."""
    positional, named = as_arguments(inputs)
    return module(*positional, **named)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and named arguments; packed sequences are one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


def _pair_of(data: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch.

    Raises:
        DataError: the data are not a pair.
    """
    if isinstance(data, list | tuple) and len(data) == 2:
        return data[0], data[1]
    kind = type(data).__name__
    if isinstance(data, Mapping):
        kind += " with keys"
    raise DataError(
        f"a batch is a {kind}",
        expected="a pair (inputs, targets)",
        fix="return pairs from the data set, or from its collate function",
        code="E_DATA",
    )
