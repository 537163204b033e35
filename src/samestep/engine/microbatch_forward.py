"""Forward of a microbatch: random state, precision, model or forward function, loss, values for logging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from samestep.config import Precision, StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, channels_last, move_next_to
from samestep.distributed.rng import Purpose, derive_seed, microbatch_seed, seed_generators
from samestep.distributed.world import World
from samestep.engine.gather import LocalOutputs
from samestep.engine.loss import Loss, StepLoss, as_loss
from samestep.engine.side_effects import OutsideState
from samestep.engine.step_stats import StepValues, means
from samestep.errors import InputError

TRAINING: Purpose = "shard"  # these bytes are hashed into seeds
EVALUATION: Purpose = "evaluation"
VALUE = "value"  # first part of the keys of values for logging

ForwardFunction = Callable[[Any, Any], Any]  # from model and data of a microbatch to a loss or a mapping
_ONE_TERM = StepLoss(torch.add)  # of a forward function, which computes the loss itself


class ForwardResult(NamedTuple):
    """Result of a forward function for one microbatch."""

    loss: Loss | None
    outputs: Any  # for metrics
    targets: Any
    values: dict[str, Loss]  # for logging


def forward_result(value: Any, samples: int, *, needs_loss: bool) -> ForwardResult:
    """Return the result of a forward function for a microbatch of `samples` samples.

    Args:
        value: a loss, or a mapping with `loss`, `outputs` and `targets` for metrics, and values for logging.
        samples: number of samples.
        needs_loss: whether a loss is required.

    Raises:
        InputError: there is no loss, or a value is no scalar.
    """
    fields = dict(value) if isinstance(value, Mapping) else {"loss": value}
    outputs, targets = fields.pop("outputs", None), fields.pop("targets", None)
    if needs_loss and fields.get("loss") is None:
        raise InputError(
            f"the forward function returned {'no loss' if 'loss' not in fields else 'None as the loss'}",
            expected="a loss, or a mapping with the key 'loss'",
            fix='return {"loss": loss, "outputs": outputs, "targets": targets}',
            code="E_LOSS",
        )
    sums = {
        name: as_loss(torch.tensor(float(item)) if isinstance(item, int | float) else item, samples, f"value {name!r}")
        for name, item in fields.items()
        if item is not None
    }
    return ForwardResult(sums.pop("loss", None), outputs, targets, sums)


class MicrobatchForward:
    """Computes outputs and loss of a microbatch under the step configuration.

    Attributes:
        values: numbers of the microbatches of the step, to which callbacks can add.
        gathers: the loss is that of the whole global batch, computed from the outputs of all microbatches.
    """

    def __init__(self, loss: StepLoss, config: StepConfig, device: torch.device) -> None:
        self.loss, self.config, self.device = loss, config, device
        self.gathers = config.gather == "global"
        self.values = StepValues()
        self._counts: list[float] = []
        self._sizes: list[int] = []  # nominal samples of each microbatch, with those that are left out
        self._is_loss_checked = False
        self.engine_number, self.outside = 0, OutsideState()
        self.function: ForwardFunction | None = None
        self.needs_loss = True
        self.results: dict[int, ForwardResult] = {}  # of the forward function, by microbatch

    @property
    def seed(self) -> int:
        """Seed of random states; engines of one world draw different numbers."""
        seed, number = self.config.seed, self.engine_number
        return derive_seed("engine", seed, number) if number else seed

    @property
    def active_loss(self) -> StepLoss:
        """The loss whose terms `term_losses` returns."""
        return self.loss if self.function is None or self.gathers else _ONE_TERM

    def begin_step(self, batch: GlobalBatch, world: World) -> None:
        """Sum the counts that the loss needs before the first forward; a collective."""
        self._counts = [] if self.function is not None or self.gathers else self.loss.global_counts(batch, world)
        self._sizes, self.results = [stop - start for start, stop in batch.bounds], {}
        self.values.begin_step([microbatch.number for microbatch in batch.local_microbatches])

    def __call__(
        self, module: torch.nn.Module, microbatch: Microbatch, position: int, *, concurrent: bool = False
    ) -> tuple[Any, Loss]:
        """Return outputs and loss of a training step after `position` steps."""
        outputs, losses = self.term_losses(module, microbatch, TRAINING, position, concurrent=concurrent)
        return outputs, self.combine(microbatch, losses)

    def term_losses(
        self,
        module: torch.nn.Module,
        microbatch: Microbatch,
        purpose: Purpose,
        position: int,
        *,
        concurrent: bool = False,
    ) -> tuple[Any, list[Loss]]:
        """Return outputs and the loss of each term; the random state depends on purpose, seed, position and microbatch.

        If other microbatches are computed at the same time (`concurrent`), generators that they share are not seeded.

        Raises:
            InputError: the batch is not a pair, or the loss function returned no loss, or a sum in place of a mean.
        """
        context = self.context(purpose, position, microbatch.number, concurrent=concurrent)
        with self.outside.unchanged(self.function, module), context:
            result = self._result(module, microbatch)
            if self.function is None:
                return result.outputs, self.losses_of_outputs(microbatch, result.outputs)
            losses = [] if result.loss is None else [result.loss]
        return result.outputs, losses if microbatch.size else _without_samples(losses)

    def outputs(self, module: torch.nn.Module, microbatch: Microbatch, purpose: Purpose, position: int) -> LocalOutputs:
        """Return a microbatch with outputs and targets; arguments as in `term_losses`.

        Raises:
            InputError: the batch is not a pair.
        """
        with self.outside.unchanged(self.function, module), self.context(purpose, position, microbatch.number):
            result = self._result(module, microbatch)
        # A loss in place of outputs is refused on every rank, when outputs are gathered.
        return LocalOutputs(microbatch, result.outputs if result.loss is None else result.loss, result.targets)

    def context(
        self, purpose: Purpose, position: int, microbatch: int, *, concurrent: bool = False
    ) -> AbstractContextManager[None]:
        """Seed the generators for a microbatch, and return the autocast context."""
        seed = microbatch_seed(purpose, self.seed, position, microbatch)
        seed_generators(seed, self.device, concurrent=concurrent)
        if self.config.reduction == "exact":
            # Also if a script has set it since `samestep.start`: ranks would select kernels by their own time.
            torch.backends.cudnn.benchmark = False
        return autocast(self.config.precision, self.device)

    def _result(self, module: torch.nn.Module, microbatch: Microbatch) -> ForwardResult:
        inputs = microbatch.pair[0] if self.function is None else microbatch.data
        inputs = channels_last(inputs) if self.config.channels_last else inputs
        if self.function is None:
            return ForwardResult(None, call_model(module, inputs), microbatch.pair[1], {})
        needs_loss = self.needs_loss and not self.gathers
        result = forward_result(self.function(module, inputs), microbatch.size, needs_loss=needs_loss)
        if not microbatch.is_filler:
            items = result.values.items() if microbatch.size else ()  # a substitute sample adds nothing
            values = {name: Loss(value.sum.detach(), value.count) for name, value in items}
            self.results[microbatch.number] = ForwardResult(None, None, result.targets, values)  # without graphs
        return result

    def losses_of_outputs(self, microbatch: Microbatch, outputs: Any) -> list[Loss]:
        """Return the loss of each term; zero for a filler, which takes part in the computation and adds nothing."""
        targets = move_next_to(microbatch.pair[1], outputs)
        losses = self.loss.term_losses(outputs, targets, microbatch.size)
        if not self._is_loss_checked and microbatch.number == 0 and microbatch.size:  # on one rank
            self._is_loss_checked = True
            self.loss.require_mean(outputs, targets, microbatch.size)
        return losses if microbatch.size else _without_samples(losses)

    def with_targets(self, microbatch: Microbatch) -> Microbatch:
        """Return a computed microbatch with data `(inputs, targets)`, targets of the forward function if it has one."""
        if self.function is None:
            return microbatch
        return microbatch._replace(data=(microbatch.data, self.results[microbatch.number].targets))

    def step_values(self) -> StepValues:
        """Return the numbers of the step, with the values for logging of the forward function."""
        for number, result in self.results.items():
            for name, value in result.values.items():
                self.values.add(number, (VALUE, name), value.sum, value.count)
        return self.values

    def means(self) -> dict[str, float]:
        """Return the means of the values for logging of the last step, equal on every rank."""
        return means([(key[1], total, count) for _, key, total, count in self.values.rows if key[0] == VALUE])

    def scalars(self) -> list[torch.Tensor]:
        """Return sums and counts of the values for logging of this rank of the last microbatches, on their devices."""
        values = chain.from_iterable(result.values.values() for result in self.results.values())
        return [torch.as_tensor(number, dtype=torch.float64) for value in values for number in (value.sum, value.count)]

    def value_names(self) -> list[list[Any]]:
        """Return microbatch and name of the values for logging of this rank, in the order of `scalars`."""
        return [[number, name] for number, result in self.results.items() for name in result.values]

    def combine(self, microbatch: Microbatch, losses: Sequence[Loss]) -> Loss:
        """Return the one loss of a training step from the losses of its terms."""
        if self.function is not None:
            return losses[0]
        return self.loss.combine(losses, self._counts, sum(self._sizes), self._sizes[microbatch.number])


def _without_samples(losses: Sequence[Loss]) -> list[Loss]:
    return [Loss(loss.sum * 0.0, 0.0) for loss in losses]


_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context of a precision."""
    if (dtype := _AUTOCAST[precision]) is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def call_model(module: torch.nn.Module, inputs: Any) -> Any:
    """Call `module`; a mapping or a tuple of inputs is unpacked into arguments."""
    positional, named = as_arguments(inputs)
    return module(*positional, **named)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and named arguments; packed sequences are one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    is_unpacked = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
    return (tuple(inputs), {}) if is_unpacked else ((inputs,), {})
