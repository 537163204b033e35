"""Several microbatches of a rank in one forward and backward, under `reduction: fast`.

A check compares a model's results for several microbatches together with those for each of them, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, channels_last, map_tensors, move_next_to, tensors_of
from samestep.distributed.logging import logger
from samestep.distributed.rng import generator_state, microbatch_seed
from samestep.distributed.world import World, all_gather
from samestep.engine.batch_norm_checks import may_have_one_value, uses_batch_statistics
from samestep.engine.buffer_rules import is_number
from samestep.engine.data_parallel import Replica, replicate
from samestep.engine.fast_merging_functions import MergedFunctions
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING, MicrobatchForward, autocast, call_model
from samestep.engine.model_changes import ModelSignature, hooked_parameter
from samestep.engine.nested_data import has_rows, join, rows, split, why_not_joined
from samestep.engine.step_runner import SequentialRunner
from samestep.engine.step_stats import LocalStats
from samestep.engine.tensor_bits import copy_tensors
from samestep.microbatches import most_owned
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.reduction import MicrobatchTree
from samestep.strategies.strategy import SingleStrategy, Strategy

SEPARATE = "the microbatches of a rank are computed one after another"
_DIFFERS = " for several microbatches together differs from that for each of them"

_MICROBATCHES, _SAMPLES = 3, 4  # of a check
# Of the largest element. The rounding of float64 is far below; that of modules which compute in float32 is below.
_TOLERANCE, _OF_ALL_GRADIENTS = 1e-5, 1e-9
State = dict[str, Any]


class MergedRunner(SequentialRunner):
    """Computes the microbatches of a rank in one forward and backward, if the model computes them as each alone.

    The first step with several microbatches on a rank decides. A change of the model between steps repeats the check on
    this rank, unless changes are frequent. A later step that reads values or draws random numbers for all samples at
    once ends the merging of this rank. A step whose inputs have different shapes, or in which a microbatch has no
    samples, is computed one microbatch after another.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_merged: bool | None = None  # None: not decided
        self._signature = ModelSignature(self.model, self.forward.outside)

    def joins_check(self, batch: GlobalBatch, *, has_forward: bool) -> bool:
        return super().joins_check(batch, has_forward=has_forward) and not self._decides(batch)

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        if self.forward.function is not None:
            self.separate_reason = "a forward function"
        if self._decides(batch):
            self._decide(batch, position)
        if self._is_merged and self._fits(batch) and self._may_still_merge(batch, position):
            return self._compute_merged(batch, position, save=save)
        return super().compute(batch, position, save=save)

    def _decides(self, batch: GlobalBatch) -> bool:
        """Return whether the ranks decide in this step; equal on every rank."""
        is_candidate = self._is_merged is None and self.forward.function is None
        return is_candidate and most_owned(batch.microbatches, self.world.data.shares) > 1

    def _decide(self, batch: GlobalBatch, position: int) -> None:
        """Check the model with samples of this rank, and decide for all ranks; a collective."""
        self._signature.has_changed()  # later steps are compared with this one
        own: str | None = ""  # not checked
        if sum(one.size > 0 for one in batch.local_microbatches) > 1 and self._has_statistics(batch):
            own = self._check(batch, position)
        reasons = all_gather(own, self.world.data)
        self.separate_reason = next(filter(None, reasons), None)
        if self.separate_reason is not None or None in reasons:  # some rank has checked
            self._is_merged = self.separate_reason is None

    def _check(self, batch: GlobalBatch, position: int) -> str | None:
        """Return the reason for which the model cannot compute the microbatches of this rank together."""
        microbatches = [one for one in batch.local_microbatches if one.size]
        self.buffers.begin(batch.microbatches)
        with self.generators.preserved(), self.undo_on_failure():
            reason = MergeCheck(self.model, self.forward, position).reason(microbatches)
        self.buffers.restore()
        return reason

    def _may_still_merge(self, batch: GlobalBatch, position: int) -> bool:
        """Check the model again if it has changed since the last step."""
        if not self._signature.has_changed():
            return True
        is_often = self._signature.changes_often
        reason = "the model changes between steps" if is_often else self._check(batch, position)
        if reason is not None:
            self._end_merging(reason, position)
        return reason is None

    def _end_merging(self, reason: str, position: int) -> None:
        """Compute one after another from now on, on this rank alone: both ways have the same messages."""
        self._is_merged, self.separate_reason = False, f"{reason}, from step {position + 1} on"
        logger.warning("%s: %s", SEPARATE, self.separate_reason)

    def _has_statistics(self, batch: GlobalBatch) -> bool:
        """Return whether each microbatch of this rank has enough samples for batch norm."""
        if may_have_one_value(batch, self.model):
            return False
        return all(one.size > 1 for one in batch.local_microbatches) or not uses_batch_statistics(self.model)

    def _fits(self, batch: GlobalBatch) -> bool:
        microbatches = batch.local_microbatches
        if self.forward.function is not None or batch.fillers or len(microbatches) < 2:
            return False
        if not all(one.size for one in microbatches) or not self._has_statistics(batch):
            return False
        inputs, sizes = [one.pair[0] for one in microbatches], [one.size for one in microbatches]
        return why_not_joined(inputs, sizes) is None

    def _compute_merged(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        strategy, total = self.strategy, None
        strategy.defers_reduction = False
        tree, stats = MicrobatchTree(batch.microbatches, batch.size), LocalStats()
        self.buffers.begin(batch.microbatches)
        merged = strategy.microbatch(tree, batch.local_microbatches[-1].number, last=True)
        with self.generators.preserved(), self.undo_on_failure(), merged:
            losses = self._losses(batch.local_microbatches, position, stats)
            if losses is None:
                stats = LocalStats()
                losses = [self._separate_losses(tree, batch.local_microbatches, position, stats)]
            strategy.prepare_backward()
            self.world.context.status.end_compute(len(batch.local_microbatches))
            total = self.sum_stats(tree, stats, save) if self._is_checked else None
            roots = [self.roots(loss.sum, batch.size) for loss in losses]
            torch.autograd.backward(
                [tensor for tensors, _ in roots for tensor in tensors],
                [gradient for _, gradients in roots for gradient in gradients],
            )
            if not strategy.defers_gradients:
                self.require_gradients(self.names)
        self._is_checked = True
        return self.finish(tree, total or self.sum_stats(tree, stats, save))

    def _losses(self, microbatches: Sequence[Microbatch], position: int, stats: LocalStats) -> list[Loss] | None:
        """Return the loss of each microbatch, and add statistics and buffers of each to `stats`.

        None if the forward did something for all samples at once that it did not in the first step.
        """
        for microbatch in microbatches:
            for callback in self.callbacks:
                callback.begin_microbatch(microbatch)
        forward, losses = self.forward, list[Loss]()
        sizes = [microbatch.size for microbatch in microbatches]
        seeds = [microbatch_seed(TRAINING, forward.seed, position, microbatch.number) for microbatch in microbatches]
        functions = MergedFunctions(self.model, sizes, seeds)
        inputs = join([microbatch.pair[0] for microbatch in microbatches])
        inputs = channels_last(inputs) if forward.config.channels_last else inputs
        with forward.outside.unchanged(None), forward.context(TRAINING, position, microbatches[0].number):
            before = generator_state(self.world.device)
            with functions:
                outputs = call_model(self.strategy.module, inputs)
            parts = split(outputs, sizes)
            for number, (microbatch, part) in enumerate(zip(microbatches, parts, strict=True)):
                losses.append(forward.combine(microbatch, forward.losses_of_outputs(microbatch, part)))
                self._add(stats, microbatch, losses[-1], functions, number, last=microbatch is microbatches[-1])
            if functions.has_read or generator_state(self.world.device) != before:
                action = "reads values" if functions.has_read else "draws random numbers"
                self._end_merging(f"the forward {action} for all samples at once", position)
                return None
        for microbatch, part, loss in zip(microbatches, parts, losses, strict=True):
            for callback in self.callbacks:
                callback.end_microbatch(forward.with_targets(microbatch), part, loss)
        return losses

    def _separate_losses(
        self, tree: MicrobatchTree, microbatches: Sequence[Microbatch], position: int, stats: LocalStats
    ) -> Loss:
        """Compute all but the last microbatch completely, and return the loss of the last one."""
        for microbatch in microbatches:
            self.buffers.restore()
            outputs, loss = self.forward(self.model, microbatch, position)
            stats.add(
                microbatch.number, loss, self.buffers.read(microbatch.number, last=microbatch is microbatches[-1])
            )
            if microbatch is not microbatches[-1]:
                self._backward(microbatch, loss, tree.samples)
                self.strategy.add_gradients(tree, microbatch.number)
            for callback in self.callbacks:
                callback.end_microbatch(self.forward.with_targets(microbatch), outputs, loss)
        return loss

    def _add(
        self, stats: LocalStats, microbatch: Microbatch, loss: Loss, functions: MergedFunctions, row: int, *, last: bool
    ) -> None:
        with torch.no_grad():
            pairs = [pair for running in functions.running for pair in running.rows(row)]
            copy_tensors([buffer for buffer, _ in pairs], [values for _, values in pairs])
        stats.add(microbatch.number, loss, self.buffers.read(microbatch.number, last=last))


def why_separate(
    config: StepConfig, world: World, strategy: Strategy, *, sync_batch_norm: bool, is_witnessed: bool
) -> str | None:
    """Return the option for which the microbatches of a rank are computed one after another; None if there is none."""
    is_replicated = isinstance(strategy, SingleStrategy | DdpStrategy)
    options = {
        "step.batch_norm: sync": sync_batch_norm,
        "several devices of a rank": world.strategy.name in ("dp", "device_map"),
        f"strategy {strategy.name}": not is_replicated,
        "step.gather: global": config.gather == "global",
        "step.compile": config.compile,
        "step.recompute": bool(config.recompute),
        "step.tensor_slices": config.tensor_slices > 1,
        "witnessed steps": is_witnessed,
    }
    return next((option for option, is_set in options.items() if is_set), None)


class Call(NamedTuple):
    """Outputs of one call of a module."""

    name: str
    outputs: list[torch.Tensor]
    effects: tuple[bool, bool]  # so far: draws from the generators of the process, and reads by the host


class Computed(NamedTuple):
    """Results of forwards and one backward."""

    outputs: list[Any]  # of each microbatch
    states: list[State]  # buffers and numbers after each microbatch
    gradients: list[torch.Tensor | None]


class MergeCheck:
    """Computes some samples of a few microbatches in float64, each alone and all together.

    The outputs, the gradients, and the state that the forward changes must be equal to rounding. Otherwise, the outputs
    of modules show which of them is the cause. Model and generators stay unchanged.
    """

    def __init__(self, model: nn.Module, forward: MicrobatchForward, position: int) -> None:
        self._model, self._forward, self._position = model, forward, position

    def reason(self, microbatches: Sequence[Microbatch]) -> str | None:
        """Return the reason for which `microbatches` cannot be computed together; None if they can."""
        sizes = [microbatch.size for microbatch in microbatches]
        if (problem := why_not_joined([microbatch.pair[0] for microbatch in microbatches], sizes)) is not None:
            return f"the inputs {problem}"
        if (name := hooked_parameter(self._model)) is not None:
            return f"the parameter {name} has hooks for the gradient of each microbatch"
        try:
            return self._compare([_few_samples(number, one) for number, one in enumerate(microbatches[:_MICROBATCHES])])
        except Exception as error:  # boundary: the reason is reported, and the microbatches are computed one by one
            return f"a check in float64 raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _compare(self, microbatches: Sequence[Microbatch]) -> str | None:
        replica = _in_double(self._model)
        names = {module: name for name, module in replica.module.named_modules()}
        alone, together = list[list[Call]](), list[Call]()
        start = _buffers(replica.module)
        separate = self._separately(replica, microbatches, names, alone)
        _set_buffers(replica.module, start)
        merged = self._together(replica, microbatches, names, together)
        sizes = [microbatch.size for microbatch in microbatches]
        if isinstance(merged, str):
            return merged
        is_equal = all(
            _equal(one, other)
            for first, second in zip(separate.outputs, merged.outputs, strict=True)
            for one, other in zip(tensors_of(first), tensors_of(second), strict=True)
        )
        parameters = [name for name, p in replica.module.named_parameters() if p.requires_grad]
        unequal = _unequal_gradients(parameters, separate.gradients, merged.gradients)
        if not is_equal or unequal:
            culprit = _first_difference(alone, together, sizes)
            return culprit or (f"the gradient of {unequal[0]}" if unequal else "the outputs") + _DIFFERS
        return _changed_state(separate.states, merged.states)

    def _separately(
        self, replica: Replica, microbatches: Sequence[Microbatch], names: Mapping[nn.Module, str], calls: list[Any]
    ) -> Computed:
        outputs, states, gradients, start = [], [], list[list[torch.Tensor | None]](), _buffers(replica.module)
        for microbatch in microbatches:
            _set_buffers(replica.module, start)
            with self._context(microbatch), _recorded_calls(names, calls.append, lambda: (False, False)):
                outputs.append(call_model(replica.module, microbatch.pair[0]))
            gradients.append(_gradients(self._loss(microbatch, outputs[-1]), replica))
            states.append(_state(replica.module))
        return Computed(_detached(outputs), states, [_sum(column) for column in zip(*gradients, strict=True)])

    def _together(
        self, replica: Replica, microbatches: Sequence[Microbatch], names: Mapping[nn.Module, str], calls: list[Any]
    ) -> Computed | str:
        sizes = [microbatch.size for microbatch in microbatches]
        seed, position = self._forward.seed, self._position
        seeds = [microbatch_seed(TRAINING, seed, position, microbatch.number) for microbatch in microbatches]
        functions, recorded = MergedFunctions(replica.module, sizes, seeds), list[list[Call]]()
        inputs = join([microbatch.pair[0] for microbatch in microbatches])
        with self._context(microbatches[0]):
            before = generator_state(self._device)

            def effects() -> tuple[bool, bool]:
                return generator_state(self._device) != before, functions.has_read

            with _recorded_calls(names, recorded.append, effects), functions:
                outputs = call_model(replica.module, inputs)
            calls += recorded[0]
            if any(effects()):
                first = next(call for call in calls if any(call.effects))
                action = "draws random numbers" if first.effects[0] else "reads values"
                return f"{first.name} {action} for all samples at once"
            if not has_rows(outputs, sum(sizes)):
                return "the outputs are not tensors with rows for each sample"
            parts = split(outputs, sizes)
            losses = [self._loss(one, part) for one, part in zip(microbatches, parts, strict=True)]
            if effects()[0]:
                return "the loss draws random numbers"
        state, states = _state(replica.module), []
        buffers = {id(buffer): name for name, buffer in replica.module.named_buffers()}
        for number in range(len(sizes)):
            pairs = [pair for one in functions.running for pair in one.rows(number)]
            states.append(state | {buffers[id(own)]: row.clone() for own, row in pairs})
        return Computed(_detached(parts), states, _gradients(torch.stack(losses).sum(), replica))

    @property
    def _device(self) -> torch.device:
        return self._forward.device

    @contextmanager
    def _context(self, microbatch: Microbatch) -> Iterator[None]:
        self._forward.context(TRAINING, self._position, microbatch.number)
        with autocast("fp32", self._device):
            yield

    def _loss(self, microbatch: Microbatch, outputs: Any) -> torch.Tensor:
        targets = move_next_to(microbatch.pair[1], outputs)
        losses: list[Loss] = self._forward.loss.term_losses(outputs, targets, microbatch.size)
        return torch.stack([loss.sum.reshape(()).double() for loss in losses]).sum()


def _few_samples(number: int, microbatch: Microbatch) -> Microbatch:
    """Return the first samples of a microbatch in float64; the numbers of samples of two microbatches differ."""
    inputs, targets = microbatch.pair
    size = min(microbatch.size, _SAMPLES - number % 2)
    if has_rows(targets, microbatch.size):
        data = (rows(inputs, microbatch.size, 0, size), rows(targets, microbatch.size, 0, size))
    else:
        data, size = (inputs, targets), microbatch.size
    return microbatch._replace(size=size, data=map_tensors(data, _double))


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _in_double(model: nn.Module) -> Replica:
    replica = replicate(model, weights={parameter: _double(parameter.detach()) for parameter in model.parameters()})
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module in replica.module.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffers.setdefault(buffer, _double(buffer))
    return replica


def _buffers(module: nn.Module) -> State:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _set_buffers(module: nn.Module, values: State) -> None:
    buffers = dict(module.named_buffers())
    copy_tensors([buffers[name] for name in values], list(values.values()))


def _state(module: nn.Module) -> State:
    numbers = {
        f"{path}.{key}" if path else key: value
        for path, one in module.named_modules()
        for key, value in vars(one).items()
        if is_number(value)
    }
    return {**numbers, **_buffers(module)}


@contextmanager
def _recorded_calls(
    names: Mapping[nn.Module, str], add: Callable[[list[Call]], None], effects: Callable[[], tuple[bool, bool]]
) -> Iterator[None]:
    """Record the calls of modules inside the block, in the order of their ends."""
    calls = list[Call]()

    def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tensors = [tensor.detach().clone() for tensor in tensors_of(outputs)]
            name = names.get(module)
            label = f"the layer {name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
            calls.append(Call(label, tensors, effects()))

    handles = [module.register_forward_hook(record) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    add(calls)


def _detached(values: Sequence[Any]) -> list[Any]:
    return [map_tensors(value, torch.Tensor.detach) for value in values]


def _gradients(loss: torch.Tensor, replica: Replica) -> list[torch.Tensor | None]:
    parameters = [p for p in replica.module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


def _sum(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return a sum; None if any is missing, which a step refuses."""
    return (
        None
        if any(one is None for one in gradients)
        else torch.stack([one for one in gradients if one is not None]).sum(0)
    )


def _equal(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    largest = float(one.abs().max()) if one.numel() else 0.0
    return math.isfinite(largest) and not bool(((one - other).abs() > max(_TOLERANCE * largest, least)).any())


def _unequal_gradients(
    names: Sequence[str], separate: Sequence[torch.Tensor | None], merged: Sequence[torch.Tensor | None]
) -> list[str]:
    largest = max((float(value.abs().max()) for value in separate if value is not None and value.numel()), default=0.0)
    unequal = []
    for name, one, other in zip(names, separate, merged, strict=True):
        least = _OF_ALL_GRADIENTS * largest
        if not (one is other if one is None or other is None else _equal(one, other, least)):
            unequal.append(name)
    return unequal


def _first_difference(alone: Sequence[Sequence[Call]], together: Sequence[Call], sizes: Sequence[int]) -> str | None:
    """Return the first module whose outputs for all samples are not those for each microbatch in order."""
    for call, *calls in zip(together, *alone, strict=False):
        if any(other.name != call.name or len(other.outputs) != len(call.outputs) for other in calls):
            return f"{call.name} is not called in the same order for each microbatch"
        for number, value in enumerate(call.outputs):
            if not _is_joined(value, [other.outputs[number] for other in calls]):
                return f"the output of {call.name}{_DIFFERS}"
    return None


def _is_joined(value: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor has the values of the parts along some dimension, or the value that all parts have."""
    if all(_equal(part, value) for part in parts):
        return True
    for dim in range(value.dim()):
        shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if shapes == {(*value.shape[:dim], *value.shape[dim + 1 :])} and _equal(torch.cat(list(parts), dim), value):
            return True
    return False


def _changed_state(separate: Sequence[State], merged: Sequence[State]) -> str | None:
    """Return the first buffer or number that ends with another value."""
    for one, other in zip(separate, merged, strict=True):
        for name, value in one.items():
            if not _equal(torch.as_tensor(value), torch.as_tensor(other.get(name, math.nan))):
                return f"{name}{_DIFFERS}"
    return None
