"""Loaders as Accelerate's scripts use them: microbatches in training, whole batches in evaluation; their positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy
import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader

from samestep.data.loader import Loader
from samestep.data.order import Order, global_order
from samestep.data.samplers import drawn_order
from samestep.distributed.rng import microbatch_seed, preserved_generators, seed_generators
from samestep.distributed.world import World
from samestep.engine.evaluation import EvaluationState, written_in_evaluation_error
from samestep.errors import CheckpointError
from samestep.integrations.accelerate_gather import Iteration
from samestep.integrations.torch_loader import (
    global_loader,
    integration_error,
    order_options,
    order_seed,
    position_of,
    restore_position,
)
from samestep.microbatches import Cursor

if TYPE_CHECKING:
    from samestep.integrations.accelerate import Accelerator


class PreparedLoader:
    """Loader in place of a prepared `DataLoader`.

    Attributes:
        dataset: the dataset.
        is_stepped: the loader was used for training, or has a saved position.
    """

    _is_accelerate_prepared = True

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            fix = "a map-style dataset, such as datasets.Dataset in place of a streaming one"
            raise integration_error(f"the IterableDataset {type(loader.dataset).__name__}", fix)
        self.dataset, self._accelerator, self._torch_loader = loader.dataset, accelerator, loader
        self._loader: Loader | None = None
        self.is_stepped = self._is_evaluated = False

    @property
    def loader(self) -> Loader:
        """The loader of global batches."""
        if self._loader is None:
            owner = self._accelerator
            self._loader = global_loader(
                self._torch_loader,
                world=owner.world,
                seed=owner.seed,
                batch_size=owner.global_batch_size,
                microbatches=owner.microbatches,
            )
        return self._loader

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of the `DataLoader`."""
        return self._torch_loader.batch_size

    def __len__(self) -> int:
        """Number of optimizer steps in an epoch; of a loader that is used for evaluation alone, number of batches.

        In the body of an evaluation, the number of its iterations on this process; otherwise the same on any number of
        processes.
        """
        owner = self._accelerator
        current = next((iteration for iteration in reversed(owner.iterations) if iteration.loader is self), None)
        if current is not None and not current.is_training:
            return current.length
        # Scripts create schedulers before the first iteration, also while a pretrained model is in evaluation mode.
        is_trained = self.is_stepped or owner.is_training or not self._is_evaluated
        if is_trained and not self._is_too_small:
            return len(self.loader)
        return len(self._torch_loader)

    @property
    def _is_too_small(self) -> bool:
        """Whether a batch has fewer samples than a global batch has microbatches, as only one of an evaluation can."""
        size, number = self._accelerator.global_batch_size or self.batch_size, self._accelerator.microbatches
        return size is not None and number != "auto" and size < number

    def __iter__(self) -> Iterator[Any]:
        iteration = Iteration(self, self._accelerator.is_training)
        self.is_stepped |= iteration.is_training
        self._is_evaluated |= not iteration.is_training
        with self._accelerator.iteration(iteration):
            for data in (self._accelerator.train_on if iteration.is_training else self._evaluate)(iteration):
                iteration.has_inner_loop = False
                yield data

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order depends on seed and epoch of the position."""

    def state(self) -> dict[str, Any] | None:
        """Return the position and the settings on which batches depend; None for a loader without steps."""
        return position_of(self.loader) if self.is_stepped else None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        restore_position(self.loader, state)
        self.is_stepped = True

    def reset(self) -> None:
        """Move to the beginning of the training."""
        self.is_stepped = False
        if self._loader is not None:
            self._loader.cursor = Cursor()

    def _evaluation_order(self) -> Order:
        loader, seed = self._torch_loader, order_seed(self._torch_loader.batch_sampler, self._accelerator.seed)
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            fix = "DataLoader(dataset, batch_size=64), with sampler= for another order"
            raise integration_error("an evaluation with a batch sampler, or without batches", fix)
        options, dataset = order_options(loader.sampler), loader.dataset
        order: Order
        if "sampler" in options:
            order = drawn_order(options["sampler"], dataset, seed=seed, epoch=0)
        else:
            order = global_order(len(dataset), seed=seed, epoch=0, shuffle=bool(options))  # type: ignore[arg-type]
        return order[: len(order) - len(order) % loader.batch_size] if loader.drop_last else order

    def _evaluate(self, iteration: Iteration) -> Iterator[Any]:
        """Yield every n-th batch of n processes; a process without one at the end computes the first batch again.

        Buffers of the prepared models keep their values: each process has other batches.
        """
        owner, loader = self._accelerator, self._torch_loader
        order, size, world = self._evaluation_order(), loader.batch_size, owner.world
        assert size is not None
        if len(order) == 0:  # drop_last
            return
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        numbers = range(world.rank, math.ceil(len(batches) / world.size) * world.size, world.size)
        iteration.length = len(numbers)
        own = numpy.concatenate([batches[number if number < len(batches) else 0] for number in numbers])
        # Each process loads its own batches, as the only one.
        alone = World(0, 1, world.device, world.context)
        sampler = BatchSampler(own.tolist(), size, drop_last=False)
        data = global_loader(loader, world=alone, seed=owner.seed, microbatches=1, batch_sampler=sampler)
        models = torch.nn.ModuleList(owner._models)
        with closing(data), preserved_generators(world.device), EvaluationState(models) as state:
            for number, batch in zip(numbers, data.complete_epoch(), strict=True):
                iteration.is_filler = number >= len(batches)
                seed_generators(microbatch_seed("evaluation", owner.seed, 0, number), world.device)
                yield batch.local_microbatches[0].data
                state.restore()
        if state.written:
            raise written_in_evaluation_error(state.written)


class Position:
    """Steps and positions in the data, as an object that Accelerate saves."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._steps = accelerator, 0

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        loop = self._accelerator._loop
        return self._steps if loop is None else loop.engine.steps

    def reset(self) -> None:
        """Begin without steps."""
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the position of each loader with steps."""
        return {"steps": self.steps, "loaders": [loader.state() for loader in self._accelerator._loaders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set steps and positions."""
        loaders, saved = self._accelerator._loaders, state["loaders"]
        if len(loaders) != len(saved):
            raise CheckpointError(
                f"the number of prepared loaders was {len(saved)} and is {len(loaders)}",
                expected="the loaders of the run that wrote the checkpoint, prepared in the same order",
                fix="prepare all of them before load_state, and no others",
                code="E_RESUME_CHANGED",
            )
        self._steps = state["steps"]
        if self._accelerator._loop is not None:
            self._accelerator._loop.engine.steps = self._steps
        for loader, position in zip(loaders, saved, strict=True):
            if position is None:
                loader.reset()  # saved before the first step
            else:
                loader.restore(position)
