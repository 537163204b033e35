"""Several microbatches of a rank in one forward and backward, with the bits of each alone, under `reduction: exact`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from samestep.data.batch import GlobalBatch, Microbatch, map_tensors, tensors_of
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.logging import logger
from samestep.distributed.rng import generator_state
from samestep.engine.callbacks import Callback
from samestep.engine.exact_batching_functions import BatchedForward, NotBatchable, has_samples
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING, call_model
from samestep.engine.model_changes import ModelSignature, hooked_part
from samestep.engine.nested_data import has_rows, join, split, why_not_joined
from samestep.engine.step_runner import SequentialRunner
from samestep.engine.tensor_bits import any_differs

MAX_BYTES = 2**30  # of activations and gradients of the microbatches computed together
_TIMED = 2  # computations in each way, of which the faster counts

Gradients = list[torch.Tensor | None]


class Computed(NamedTuple):
    """Results of the forward and backward of one microbatch."""

    outputs: Any
    loss: Loss
    gradients: Gradients


class BatchedRunner(SequentialRunner):
    """Computes microbatches together if each then has the bits that it has alone, and if this is faster.

    Both are determined with the first batch whose shapes are those of the batch before: the microbatches are computed
    in both ways, and outputs, losses and gradients must have the same bits. Other shapes are computed one after
    another. A change of the model between steps repeats the decision, unless changes are frequent. The results are
    equal in either case, so each rank decides for itself.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shapes: object = None  # of the last batch; the checked ones as soon as there is a decision
        self._parts: Sequence[Microbatch] = ()  # to be computed together in this step
        self._results: dict[int, Computed] = {}
        self._signature = ModelSignature(self.model, self.forward.outside)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        self._samples, self._results, self._parts = batch.size, {}, ()
        if len(batch.local_microbatches) > 1 and self.computes_together is not False:
            if self._signature.has_changed():
                self._repeat_decision()
            if self._signature.changes_often:
                self._set_reason("values or hooks of the model change between steps")
            elif (option := self._option()) is not None:
                self._set_reason(option)
            elif not self.is_witnessed and self.strategy.batchable is not None:
                self._parts = batch.local_microbatches[self.strategy.batchable]
        return super().compute(batch, position, save=save)

    def shares_moved(self) -> None:
        self._repeat_decision()

    def _repeat_decision(self) -> None:
        self._shapes, self.computes_together, self.alone_reason = None, None, None

    def _outputs(self, microbatch: Microbatch, position: int) -> tuple[Any, Loss]:
        if self._parts and microbatch is self._parts[0]:
            self._compute_together(self._parts, position)
        if microbatch.is_filler or microbatch.number not in self._results:
            return super()._outputs(microbatch, position)
        return self._results[microbatch.number][:2]

    def _backward(self, microbatch: Microbatch, loss: Loss, samples: int) -> None:
        result = None if microbatch.is_filler else self._results.pop(microbatch.number, None)
        if result is None:
            return super()._backward(microbatch, loss, samples)
        for parameter, gradient in zip(self.names, result.gradients, strict=True):
            parameter.grad = gradient

    def _compute_together(self, parts: Sequence[Microbatch], position: int) -> None:
        """Compute microbatches together, if this has equal bits, or decide now whether it has."""
        shapes = [(part.size, [(t.shape, t.stride(), t.dtype) for t in tensors_of(part.data)]) for part in parts]
        is_repeated, is_decided = shapes == self._shapes, self.computes_together is not None
        if not is_decided:
            self._shapes = shapes
        if len(parts) < 2 or not is_repeated or not self._is_checked:
            return
        try:
            if not is_decided:
                self._decide(parts, position)
            results = self._together(parts, position)
            changes = self.buffers.read(parts[0].number, last=False)
            if changes is not None and bool(changes.any()):
                raise NotBatchable("the forward changes the state of the model")
            self._results = {part.number: result for part, result in zip(parts, results, strict=True)}
        except NotBatchable as error:
            self._set_reason(str(error))
        finally:
            self.buffers.restore()

    def _decide(self, parts: Sequence[Microbatch], position: int) -> None:
        """Compute microbatches in both ways, and compare bits and time.

        Raises:
            NotBatchable: the bits differ, or computing together is not possible, too large or slower.
        """
        if (reason := self._reason(parts)) is not None:
            raise NotBatchable(reason)
        try:
            for part, result in zip(parts, self._together(parts, position), strict=True):
                if (difference := first_difference(self.names, self._alone(part, position), result)) is not None:
                    raise NotBatchable(f"other bits of {difference}")
            best = [min(times) for times in zip(*(self._times(parts, position) for _ in range(_TIMED)), strict=True)]
        except NotBatchable:
            raise
        except Exception as error:  # boundary: the reason is logged, and microbatches are computed one after another
            raise NotBatchable(f"a check raised {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if best[1] >= best[0]:
            alone, together = (round(1000 * seconds, 1) for seconds in best)
            raise NotBatchable(f"together, they take {together} ms, and {alone} ms one after another")
        self.computes_together = True
        logger.debug(f"{len(parts)} microbatches are computed together: the bits are those of each alone")

    def _reason(self, parts: Sequence[Microbatch]) -> str | None:
        """Return a property of model and data that excludes computing together."""
        sizes = [part.size for part in parts]
        if not all(sizes):
            return "a microbatch has no usable sample"
        if (problem := why_not_joined([part.pair[0] for part in parts], sizes)) is not None:
            return f"the inputs {problem}"
        if self.buffers.active or self.buffers.attributes.are_changed_by_forward:
            return "the forward changes the state of the model"
        if (part := hooked_part(self.model)) is not None:
            return part
        needed = self._bytes(parts)
        return f"{needed / 2**20:.0f} MiB of activations and gradients" if needed > MAX_BYTES else None

    def _bytes(self, parts: Sequence[Microbatch]) -> int:
        """Return an upper limit of the memory of activations and gradients of microbatches together."""
        with torch.no_grad():
            functions, _ = self._call(parts[:1], 0)
        rows = len(parts) * max(part.size for part in parts) / parts[0].size
        return int(functions.bytes * rows) + len(parts) * sum(parameter.nbytes for parameter in self.names)

    def _call(self, parts: Sequence[Microbatch], position: int) -> tuple[BatchedForward, Any]:
        """Return the outputs of the model for microbatches together, and the gradients of their backward to come."""
        inputs, forward = join([part.pair[0] for part in parts]), self.forward
        functions = BatchedForward([part.size for part in parts], self.names, tensors_of(inputs))
        with forward.outside.unchanged(None), forward.context(TRAINING, position, parts[0].number):
            before = generator_state(self.world.device)
            with functions:
                outputs = call_model(self.model, inputs)
            if generator_state(self.world.device) != before:
                raise NotBatchable("the forward draws random numbers")
        if not has_rows(outputs, functions.samples) or not all(map(has_samples, tensors_of(outputs))):
            raise NotBatchable("the outputs are not tensors with rows of samples")
        return functions, outputs

    def _together(self, parts: Sequence[Microbatch], position: int) -> list[Computed]:
        """Compute microbatches in one forward and backward."""
        functions, outputs = self._call(parts, position)
        pieces, losses = split(outputs, functions.sizes), []
        for part, rows in zip(parts, pieces, strict=True):
            with self.forward.outside.unchanged(None), self.forward.context(TRAINING, position, part.number):
                losses.append(self.forward.combine(part, self.forward.losses_of_outputs(part, rows)))
        roots = [self.roots(loss.sum, self._samples) for loss in losses]
        torch.autograd.backward([t for tensors, _ in roots for t in tensors], [g for _, own in roots for g in own])
        if any(parameter.grad is not None for parameter in self.names):
            for parameter in self.names:
                parameter.grad = None
            raise NotBatchable("a parameter receives a gradient from a function that is not one of torch's")
        results = zip(pieces, losses, functions.gradients, strict=True)
        return [
            Computed(map_tensors(rows, torch.Tensor.detach), Loss(loss.sum.detach(), loss.count), gradients)
            for rows, loss, gradients in results
        ]

    def _alone(self, part: Microbatch, position: int) -> Computed:
        self.buffers.restore()
        outputs, loss = self.forward(self.model, part, position)
        tensors, slopes = self.roots(loss.sum, self._samples)
        return Computed(outputs, loss, list(torch.autograd.grad(tensors, list(self.names), slopes, allow_unused=True)))

    def _times(self, parts: Sequence[Microbatch], position: int) -> tuple[float, float]:
        """Return the seconds for microbatches one after another, and together."""
        began = self._clock()
        for part in parts:
            self._alone(part, position)
        middle = self._clock()
        self._together(parts, position)
        return middle - began, self._clock() - middle

    def _clock(self) -> float:
        """Return processor time, which other processes do not change; the time of an accelerator on one."""
        if not is_accelerator(self.world.device):
            return time.process_time()
        accelerator_module().synchronize(self.world.device)
        return time.perf_counter()

    def _set_reason(self, reason: str) -> None:
        self.computes_together, self.alone_reason = False, reason
        logger.debug(f"microbatches are computed one after another: {reason}")

    def _option(self) -> str | None:
        """Return an option that excludes computing together."""
        config, is_excluded = self.forward.config, self.strategy.batchable is None
        options = {
            f"strategy {self.strategy.name}": is_excluded or self.world.strategy.name == "device_map",
            f"step.precision: {config.precision}": config.precision != "fp32",
            "step.compile": config.compile,
            "step.recompute": bool(config.recompute),
            "step.tensor_slices": config.tensor_slices > 1,
            "step.channels_last": config.channels_last,
            "a forward function": self.forward.function is not None,
            "a callback at the beginning of each microbatch": any(
                type(callback).begin_microbatch is not Callback.begin_microbatch for callback in self.callbacks
            ),
        }
        return next((option for option, is_set in options.items() if is_set), None)


def first_difference(names: Mapping[torch.nn.Parameter, str], one: Computed, other: Computed) -> str | None:
    """Return the name of a result of a microbatch that has other bits in another computation; None if all are equal."""
    pairs: dict[str, tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]] = {}
    pairs["outputs"] = (list(tensors_of(one.outputs)), list(tensors_of(other.outputs)))
    pairs["loss"] = ([one.loss.sum], [other.loss.sum])
    for name, first, second in zip(names.values(), one.gradients, other.gradients, strict=True):
        pairs[f"gradient of {name}"] = ([first], [second])
    for name, (firsts, seconds) in pairs.items():
        if any(_differ(first, second) for first, second in zip(firsts, seconds, strict=True)):
            return name
    return None


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return one.shape != other.shape or bool(any_differs([one], [other]))
