"""CUDA graphs of microbatches: forward and backward of one shape are recorded once, and replayed with the same bits.

A replay launches all kernels of a microbatch by one call, which saves the time that the host needs for each operation.
The Python code of model and loss does not run in a replay. So a graph is used only after a replay had the bits of the
same microbatch computed as usual, in a later step than that of the recording, with other data, weights and random
numbers; and it is dropped if numbers that the forward can read, or the memory of parameters and buffers, change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, map_tensors, tensors_of
from samestep.data.structure import TensorSpec, describe
from samestep.distributed.devices import capture_graph, is_accelerator, rehearse_graph
from samestep.distributed.logging import logger
from samestep.distributed.rng import generator_state, microbatch_seed, seed_device, seed_generators
from samestep.distributed.world import World
from samestep.engine.callbacks import Callback, Intervention
from samestep.engine.fast_merging import MergedRunner
from samestep.engine.loss import Loss
from samestep.engine.microbatch_forward import TRAINING
from samestep.engine.model_changes import ModelSignature, hooked_part
from samestep.engine.step_runner import SequentialRunner, StepRunner
from samestep.engine.tensor_bits import any_differs, copy_tensors
from samestep.errors import InputError
from samestep.strategies.strategy import Strategy
from samestep.units import format_bytes

MAX_GRAPHS = 2  # sizes of microbatches differ by at most one sample; each graph keeps the memory of its activations


_CALLBACK = "a callback at the beginning of each microbatch"


class Computed(NamedTuple):
    """Results of the forward and backward of one microbatch."""

    outputs: Any
    loss: Loss
    gradients: list[torch.Tensor | None]


class NotCapturable(Exception):
    """The microbatches of a model cannot be recorded; the message is the reason."""


@dataclass(eq=False)
class CapturedMicrobatch:
    """Graph of the forward and backward of a microbatch.

    Attributes:
        replay: computes `results` from `inputs`.
        inputs: tensors in whose memory the data of a microbatch is copied.
        results: tensors that each replay overwrites.
        position: number of steps before the recording.
        is_proven: a replay had the bits of the same microbatch computed as usual.
    """

    replay: Callable[[], None]
    inputs: Sequence[torch.Tensor]
    results: Computed
    position: int
    is_proven: bool = False


class GraphRunner(SequentialRunner):
    """Computes microbatches one after another, by graphs where they have the same bits.

    The first microbatch of a shape is computed as usual. The next one is recorded, and one of a later step is computed
    in both ways. Each rank decides for itself: results and messages are the same in either case.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._captured: dict[object, CapturedMicrobatch] = {}  # by shape
        self._seen: set[object] = set()  # shapes of microbatches computed as usual
        self._signature, self._constants = ModelSignature(self.model, self.forward.outside), object()
        self._eligible: set[int] = set()  # numbers of the microbatches in this step that may be replayed
        self._results: dict[int, Computed] = {}
        self._unproven: tuple[CapturedMicrobatch, Computed, Computed] | None = None

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> torch.Tensor:
        self._divisors = batch.size, batch.bounds[-1][1]  # the step divides by one of them
        self._eligible, self._results, self._unproven = set(), {}, None
        if self._is_checked and self.replays_graphs is not False:
            if (option := self._option()) is not None:
                self._refuse(option)
            else:
                self._eligible = {part.number for part in batch.local_microbatches[self.strategy.batchable or slice(0)]}
        if self._eligible and (constants := self._read_constants()) != self._constants:
            self._captured, self._seen, self._constants = {}, set(), constants
        return super().compute(batch, position, save=save)

    def _outputs(self, microbatch: Microbatch, position: int) -> tuple[Any, Loss]:
        is_eligible = microbatch.number in self._eligible and microbatch.size > 0 and not microbatch.is_filler
        if not is_eligible or self.replays_graphs is False:
            return super()._outputs(microbatch, position)
        try:
            captured = self._find(microbatch, position)
        except NotCapturable as error:
            self._refuse(str(error))
            captured = None
        if captured is None:
            return super()._outputs(microbatch, position)
        replayed = self._replay(captured, microbatch, position)
        if captured.is_proven:
            self._results[microbatch.number] = replayed
            return replayed.outputs, replayed.loss
        return self._compute_again(captured, replayed, microbatch, position)

    def _backward(self, microbatch: Microbatch, loss: Loss, samples: int) -> None:
        result = None if microbatch.is_filler else self._results.pop(microbatch.number, None)
        if result is not None:
            for parameter, gradient in zip(self.names, result.gradients, strict=True):
                parameter.grad = gradient
            return
        super()._backward(microbatch, loss, samples)
        if self._unproven is not None:
            (captured, replayed, usual), self._unproven = self._unproven, None
            usual = usual._replace(gradients=[parameter.grad for parameter in self.names])
            if (difference := _first_difference(self.names, usual, replayed)) is not None:
                self._refuse(f"other bits of {difference}")
            else:
                captured.is_proven = self.replays_graphs = True
                logger.debug("microbatches are replayed as CUDA graphs: the bits are those of each computed as usual")

    def _find(self, microbatch: Microbatch, position: int) -> CapturedMicrobatch | None:
        """Return the graph for a microbatch, if it may be replayed now; record it if its shape occurs again.

        Raises:
            NotCapturable: this is not possible.
        """
        specs: list[TensorSpec] = []
        structure = describe(microbatch.data, "the data", specs)
        tensors = list(tensors_of(microbatch.data))
        for spec in specs:
            if not spec.dtype or spec.requires_grad:
                raise NotCapturable(spec.path if not spec.dtype else f"{spec.path} requires a gradient")
        forms = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        key = microbatch.size, self._divisors, repr(structure), forms
        captured = self._captured.get(key)
        if captured is not None:
            return captured if captured.is_proven or captured.position < position else None
        if key in self._seen and len(self._captured) < MAX_GRAPHS:
            try:
                self._captured[key] = self._capture(microbatch, position)
            finally:
                self.buffers.restore()
        if len(self._captured) < MAX_GRAPHS:
            self._seen.add(key)
        return None

    def _capture(self, microbatch: Microbatch, position: int) -> CapturedMicrobatch:
        """Record the forward and backward of a microbatch.

        Raises:
            NotCapturable: model, data or random numbers do not allow it.
            InputError: the recording failed, after which torch's generator of random numbers cannot be used.
        """
        if (reason := self._reason(microbatch)) is not None:
            raise NotCapturable(reason)
        static = microbatch._replace(data=map_tensors(microbatch.data, torch.clone))
        inputs = list(tensors_of(static.data))
        seed = microbatch_seed(TRAINING, self.forward.seed, position, microbatch.number)
        seed_generators(seed, self.world.device)
        before = generator_state()
        self._rehearse(static, position)
        if generator_state() != before:  # each computation begins with the same seeds
            raise NotCapturable("the forward draws random numbers on the host")
        seed_device(seed, self.world.device)  # while a graph is recorded, no other seed can be set
        try:
            replay, results = capture_graph(self.world.device, lambda: self._compute(static, position))
        except Exception as error:
            raise _error(
                f"the recording raised {_text(error)}",
                "every operation of model and loss can be a part of a CUDA graph",
            ) from error
        return CapturedMicrobatch(replay, inputs, results, position)

    def _rehearse(self, microbatch: Microbatch, position: int) -> None:
        """Compute a microbatch in the way in which it is recorded later.

        Raises:
            NotCapturable: model, loss or backward raised an error, as for a wait for the device.
        """
        try:
            results, needed, free = rehearse_graph(self.world.device, lambda: self._compute(microbatch, position))
        except Exception as error:  # boundary: the reason is logged, and microbatches are computed as usual
            raise NotCapturable(f"a rehearsal raised {_text(error)}") from error
        if needed > free:
            raise NotCapturable(f"a graph needs {format_bytes(needed)}, and {format_bytes(free)} are free")
        specs: list[TensorSpec] = []
        describe(results.outputs, "the outputs", specs)
        if self.callbacks and (unknown := next((spec.path for spec in specs if not spec.dtype), None)):
            raise NotCapturable(unknown)
        if any(gradient is not None and gradient.is_sparse for gradient in results.gradients):
            raise NotCapturable("a gradient is sparse")

    def _compute(self, microbatch: Microbatch, position: int) -> Computed:
        """Compute a microbatch with parameters that have no part in other graphs of autograd."""
        with _aliases(self.model, self.names) as aliases:
            outputs, loss = self.forward(self.model, microbatch, position)
            torch.autograd.backward(*self.roots(loss.sum, self._divisors[0]))
        count = loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count
        gradients = [alias.grad for alias in aliases]
        return Computed(map_tensors(outputs, torch.Tensor.detach), Loss(loss.sum.detach(), count), gradients)

    def _replay(self, captured: CapturedMicrobatch, microbatch: Microbatch, position: int) -> Computed:
        """Return results of a microbatch that later replays leave unchanged; outputs for callbacks only."""
        copy_tensors(list(captured.inputs), list(tensors_of(microbatch.data)))
        seed_device(microbatch_seed(TRAINING, self.forward.seed, position, microbatch.number), self.world.device)
        captured.replay()
        outputs, loss, gradients = captured.results
        present = [gradient for gradient in gradients if gradient is not None]
        copied = [torch.empty_like(gradient) for gradient in present]
        copy_tensors(copied, present)
        rest = iter(copied)
        return Computed(
            map_tensors(outputs, torch.clone) if self.callbacks else outputs,
            Loss(loss.sum.clone(), loss.count.clone() if isinstance(loss.count, torch.Tensor) else loss.count),
            [None if gradient is None else next(rest) for gradient in gradients],
        )

    def _compute_again(
        self, captured: CapturedMicrobatch, replayed: Computed, microbatch: Microbatch, position: int
    ) -> tuple[Any, Loss]:
        """Compute a replayed microbatch as usual, and compare the buffers; `_backward` compares the rest."""
        buffers = list(self.model.buffers())
        ends = [buffer.clone() for buffer in buffers]
        self.buffers.restore()
        outputs, loss = super()._outputs(microbatch, position)
        present = list(self.model.buffers())
        if len(present) != len(buffers) or any(one is not other for one, other in zip(present, buffers, strict=True)):
            self._refuse("the forward replaces buffers")
        elif ends and any_differs(present, ends):
            self._refuse("other bits of buffers")
        else:
            self._unproven = captured, replayed, Computed(outputs, loss, [])
        return outputs, loss

    def _read_constants(self) -> object:
        """Return values and addresses of memory that become constants of a graph."""
        values = self._signature.read()
        attributes = [value for value in self._signature.attributes() if type(value) is torch.Tensor]
        tensors = (*self.model.parameters(), *self.model.buffers(), *attributes)
        return values, [tensor.data_ptr() for tensor in tensors]

    def _option(self) -> str | None:
        """Return a property of the step that excludes graphs."""
        if any(type(callback).begin_microbatch is not Callback.begin_microbatch for callback in self.callbacks):
            return _CALLBACK
        if self.forward.function is not None:
            return "a forward function"
        if self.forward.loss.term_count > 1:
            return "a loss of several terms"  # whose factors depend on the counts of the global batch
        tensors = {name for name, _ in (*self.model.named_buffers(), *self.model.named_parameters())}
        if self.buffers.attributes.are_changed_by_forward or not tensors.issuperset(self.buffers.active):
            return "the forward changes attributes of modules"
        return hooked_part(self.model)

    def _reason(self, microbatch: Microbatch) -> str | None:
        """Return a property of model and data that excludes graphs."""
        if any(tensor.device != self.world.device for tensor in tensors_of(microbatch.data)):
            return "the data has tensors of another device"
        kinds = {type(parameter) for parameter in self.names} - {torch.nn.Parameter}
        return f"parameters of type {kinds.pop().__name__}" if kinds else None

    def _refuse(self, reason: str) -> None:
        """Compute all microbatches as usual from now on.

        Raises:
            InputError: `step.cuda_graphs` is `on`, unless the reason is a callback, such as that of `samestep profile`.
        """
        self.replays_graphs, self.graphs_reason = False, reason
        self._captured = {}
        logger.debug(f"no CUDA graphs: {reason}")
        if self.forward.config.cuda_graphs == "on" and reason != _CALLBACK:
            raise _error(reason, "a model whose microbatches can be replayed with the same bits")


def with_graphs(
    kind: type[StepRunner], strategy: Strategy, world: World, config: StepConfig, callbacks: Sequence[Callback]
) -> tuple[type[StepRunner], str | None, bool | None]:
    """Return the class of the runner, why it has no graphs, and whether it has: None if not known, or by `off`.

    Raises:
        InputError: `step.cuda_graphs` is `on`, and device, strategy or other options exclude graphs.
    """
    if config.cuda_graphs == "off":
        return kind, None, None
    if any(isinstance(callback, Intervention) for callback in callbacks):
        return kind, "a run of samestep verify", False
    is_plain = kind is SequentialRunner
    options = {
        f"device {world.device}": not is_accelerator(world.device),
        "step.merge: auto": kind is MergedRunner,
        "step.gather: global": config.gather == "global",
        "step.batch_norm: sync": config.batch_norm == "sync" and not is_plain,
        f"strategy {world.strategy.name}": world.strategy.name in ("dp", "device_map"),
        f"strategy {strategy.name}": strategy.batchable is None or not is_plain,
        "step.compile": config.compile,
        "step.recompute": bool(config.recompute),
        "step.tensor_slices": config.tensor_slices > 1,
    }
    reason = next((option for option, is_set in options.items() if is_set), None)
    if reason is None:
        return GraphRunner, None, None
    if config.cuda_graphs == "on":
        raise _error(reason, "a GPU, and options with which a rank computes microbatches one after another on it")
    return kind, reason, False


def _first_difference(names: Mapping[torch.nn.Parameter, str], one: Computed, other: Computed) -> str | None:
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


@contextmanager
def _aliases(model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Replace parameters inside the block by others with the same memory.

    Autograd keeps the stream on which a parameter was first used, as long as a graph or DDP refers to it, and work on
    another stream than its own ends a recording.
    """
    aliases = {parameter: torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [
        (module, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter in aliases
    ]
    # Recurrent layers of torch keep references, and move parameters to other memory where they find new ones.
    attributes = [(module, dict(vars(module))) for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    try:
        for module, key, parameter in places:
            setattr(module, key, aliases[parameter])  # which recurrent layers of torch follow, unlike `_parameters`
        yield list(aliases.values())
    finally:
        for module, values in attributes:
            vars(module).update(values)
        for module, key, parameter in places:
            setattr(module, key, parameter)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _error(reason: str, expected: str) -> InputError:
    return InputError(
        f"CUDA graphs of microbatches are not possible: {reason}",
        expected,
        "set step.cuda_graphs: off",
        code="E_INCOMPATIBLE",
    )
