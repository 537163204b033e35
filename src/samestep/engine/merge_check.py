"""Check in float64 of a model's results for several microbatches together against those for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from samestep.data.batch import Microbatch, map_tensors, move_next_to, tensors_of
from samestep.distributed.rng import generator_state, microbatch_seed
from samestep.engine.buffer_rules import is_number
from samestep.engine.data_parallel import Replica, replicate
from samestep.engine.fast_merging_functions import MergedFunctions
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING, MicrobatchForward, autocast, call_model
from samestep.engine.model_changes import hooked_parameter
from samestep.engine.nested_data import has_rows, join, rows, split, why_not_joined
from samestep.engine.tensor_bits import copy_tensors

_DIFFERS = " for several microbatches together differs from that for each of them"

_MICROBATCHES, _SAMPLES = 3, 4  # of a check
# Of the largest element. The rounding of float64 is far below; that of modules which compute in float32 is below.
_TOLERANCE, _OF_ALL_GRADIENTS = 1e-5, 1e-9
State = dict[str, Any]


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
            culprit = _first_difference(alone, together)
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


def _first_difference(alone: Sequence[Sequence[Call]], together: Sequence[Call]) -> str | None:
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
