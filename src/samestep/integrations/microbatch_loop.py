"""Steps of an engine whose forward and backward are in the body of the user's loop.

    loop = samestep.MicrobatchLoop(model, world=world)
    for inputs, targets in loop.microbatches(batches):
        loop.backward(cross_entropy(model(inputs), targets))
        if loop.is_last:
            optimizer.step()

`Engine.step` calls a forward function for each microbatch. Here the body of a loop is this function: the step runs in a
thread that waits while the body computes, and the body waits while the step computes. Never do both run.

The optimizer and the losses of such steps serve the adapters of other libraries too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.data.loader import Loader
from samestep.distributed.devices import accelerator_module, allows_tf32, is_accelerator
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.engine.buffer_rules import Rule
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError

loop_error = partial(InputError, code="E_MICROBATCH_LOOP")


class MicrobatchLoop:
    """Iteration over the microbatches of global batches, with forward, backward and update in the body of the loop.

    Every rank runs the body equally often: a rank with fewer microbatches than another computes fillers, two samples
    whose loss and gradient do not count. After the last microbatch of a global batch, `.grad` of each parameter is the
    gradient of the mean loss of the global batch; before, it is None. A resumed run sets `engine.steps` and the cursor
    of its loader, in addition to the state of model and optimizer.

    Args:
        model: the model, without a wrapper such as DDP; moved to the world's device.
        world: the ranks.
        seed: seed of random states of the forward, such as dropout.
        buffers: rules for buffers, as in `samestep.Engine`.

    Attributes:
        engine: computes the steps; its optimizer leaves the parameters unchanged.
        microbatch: the current microbatch; None outside of the loop.
        is_first: the current microbatch is the first one of this rank in its global batch.
        is_last: the current microbatch is the last one of this rank in its global batch.
        result: result of the last step, equal on every rank; `lr` is 0. None before the first step.
    """

    def __init__(
        self, model: torch.nn.Module, *, world: World, seed: int = 0, buffers: Mapping[str, Rule] | None = None
    ) -> None:
        self._optimizer = GradientsOnly(model)
        config = StepConfig(seed=seed, tf32=allows_tf32())
        self.engine = Engine(model, self._optimizer, world=world, config=config, buffers=buffers)
        self.microbatch: Microbatch | None = None
        self.is_first = self.is_last = False
        self.result: StepResult | None = None
        self._thread: _StepThread | None = None
        self._next: Microbatch | StepResult | None = None  # None: the body has not called `backward`

    @property
    def is_open(self) -> bool:
        """Whether the current global batch is not complete."""
        return isinstance(self._next, Microbatch) or (self.microbatch is not None and self._next is None)

    def microbatches(self, loader: Loader) -> Iterator[Any]:
        """Yield the data of each microbatch of this rank, from the cursor of `loader` to the end of the epoch.

        The random state of a microbatch depends on seed, step and microbatch. If the loop ends within a global batch,
        the step is undone.

        Raises:
            InputError: the body did not call `backward`.
        """
        if self._thread is not None:
            raise loop_error(
                "an iteration over microbatches within another one",
                expected="one training loop at a time on one model",
                fix="end the outer loop first; evaluate with samestep.evaluate",
            )
        loader.planner.equal_counts = True
        self._thread = _StepThread(self.engine)
        try:
            for batch in loader:
                self._optimizer.follow()
                yield from self._step(self._thread, batch)
        finally:
            self._thread.end()
            if self.is_open:
                logger.warning("a loop ended within a global batch: the batch had no effect")
            self._thread = self.microbatch = self._next = None

    def _step(self, thread: _StepThread, batch: GlobalBatch) -> Iterator[Any]:
        last = len(batch.local_microbatches) + len(batch.fillers) - 1
        state, index = thread.begin(batch), 0
        while isinstance(state, Microbatch):
            self.microbatch, self._next = state, None
            self.is_first, self.is_last, index = index == 0, index == last, index + 1
            # Again: the body may have drawn numbers after the backward of the microbatch before.
            self.engine.seed_forward(state.number)
            yield state.data
            if self._next is None:
                raise loop_error(
                    f"the loop asks for the microbatch after microbatch {state.number} without a backward",
                    expected="one call of backward for each microbatch in training mode",
                    fix="call backward(loss) in the body; call model.eval() before an evaluation",
                )
            state = self._next

    def backward(self, loss: torch.Tensor | Loss) -> None:
        """Compute the gradient of a microbatch; after the last one, sum the gradients of all microbatches and ranks.

        Args:
            loss: the mean over the samples of the microbatch, or sum and count.

        Raises:
            InputError: no microbatch is open, or the loss is no scalar.
            NonFiniteError: loss or gradient of the global batch is not finite.
            UnusedParameterError: a trained parameter received no gradient.
        """
        if self._thread is None or self.microbatch is None or self._next is not None:
            raise loop_error(
                "backward without a microbatch" if self._thread is None else "a second backward for one microbatch",
                expected="one call of backward for each microbatch of the loop",
                fix="add the losses, and call backward once, in the body of the loop",
            )
        try:
            self._next = self._thread.answer(loss)
        except BaseException:
            self.microbatch = None  # the step has failed
            raise
        if isinstance(self._next, StepResult):
            self.result = self._next


class GradientsOnly(torch.optim.Optimizer):
    """Optimizer without updates: `Engine.step` leaves the gradient of the global batch in `.grad`.

    The library clips the gradients and updates the parameters.

    Args:
        model: the optimizer holds its trained parameters.
    """

    has_rate = False  # `lr` has no meaning

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        super().__init__(self._trained(), {"lr": 0.0})

    def follow(self) -> None:
        """Adapt to parameters that have been added, replaced, frozen or unfrozen."""
        self.param_groups[0]["params"] = self._trained()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Leave the parameters unchanged."""

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


def counted_loss(mean: torch.Tensor, count: float | torch.Tensor) -> Loss:
    """Return the loss of a microbatch from its mean over `count` items, such as labels.

    Without items, the loss is 0, also if the mean is NaN.
    """
    counts = torch.as_tensor(count, device=mean.device)
    return Loss(torch.where(counts > 0, mean * counts, 0.0), count)


def with_numbers(batch: GlobalBatch) -> GlobalBatch:
    """Return a batch of which a forward function receives each microbatch itself, with its number, as the data."""
    own, fillers = (
        tuple(microbatch._replace(data=microbatch) for microbatch in microbatches)
        for microbatches in (batch.local_microbatches, batch.fillers)
    )
    return replace(batch, local_microbatches=own, fillers=fillers)


class _LoopEndedError(Exception):
    """The loop has ended within a step."""


class _StepThread:
    """Runs the steps of an engine; the caller's thread computes the loss of each microbatch."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._forward = engine, self._wait_for_loss
        self._to_step: SimpleQueue[Any] = SimpleQueue()  # batches and losses; None to end
        self._to_loop: SimpleQueue[Microbatch | StepResult | BaseException] = SimpleQueue()
        # A daemon thread: a failed rank must be able to exit while a collective is pending.
        self._thread = Thread(target=self._run, args=[torch.get_num_threads()], name="samestep-step", daemon=True)
        self._thread.start()

    def begin(self, batch: GlobalBatch) -> Microbatch | StepResult:
        """Begin a step, and return its first microbatch."""
        return self.answer(with_numbers(batch))

    def answer(self, message: GlobalBatch | Loss | torch.Tensor) -> Microbatch | StepResult:
        """Give the loss of a microbatch, and return the next microbatch, or the result of the step."""
        self._to_step.put(message)
        state = self._to_loop.get()
        if isinstance(state, BaseException):
            raise state
        return state

    def end(self) -> None:
        """End the thread; an unfinished step is undone."""
        self._to_step.put(None)
        self._to_step.put(None)  # the first one ends a step, if there is one
        self._thread.join()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a setting of each thread
        if is_accelerator(self._engine.world.device):
            accelerator_module().set_device(self._engine.world.device)
        while (batch := self._to_step.get()) is not None:
            try:
                self._to_loop.put(self._engine.step(batch, forward=self._forward))
            except BaseException as error:  # boundary: `answer` raises it in the thread of the loop
                self._to_loop.put(error)

    def _wait_for_loss(self, model: torch.nn.Module, microbatch: Microbatch) -> Any:
        self._to_loop.put(microbatch)
        loss = self._to_step.get()
        if loss is None:
            raise _LoopEndedError
        return loss
