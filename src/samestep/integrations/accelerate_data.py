"""Loaders as Accelerate's scripts use them: microbatches in training, whole batches in evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader

from samestep.data.loader import Loader
from samestep.data.order import global_order
from samestep.data.permutation import Order
from samestep.data.samplers import drawn_order
from samestep.distributed.rng import microbatch_seed, preserved_generators, seed_generators
from samestep.distributed.world import World
from samestep.integrations.lightning_data import SamestepDataLoader
from samestep.integrations.torch_loader import global_loader, integration_error, order_options

if TYPE_CHECKING:
    from samestep.integrations.accelerate import Accelerator


class PreparedLoader:
    """Loader in place of a prepared `DataLoader`.

    Attributes:
        dataset: the dataset.
        is_stepped: the loader was used for training, or has a saved position.
        has_inner_loop: a loop over another prepared loader has ended since the current samples.
    """

    _is_accelerate_prepared = True

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise integration_error(
                f"the {type(loader.dataset).__name__} of a DataLoader is an IterableDataset",
                "a dataset with a length and one sample per index",
                "a map-style dataset, such as datasets.Dataset in place of a streaming one",
            )
        self.dataset, self._accelerator, self._torch_loader = loader.dataset, accelerator, loader
        self._loader: Loader | None = None
        self._is_training = self._is_filler = self.is_stepped = self.has_inner_loop = False

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
    def is_filler(self) -> bool:
        """Whether the current samples are computed a second time, and do not count."""
        microbatch = self._accelerator.loop.microbatch if self._is_training else None
        return self._is_filler if microbatch is None else microbatch.is_filler

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of the `DataLoader`."""
        return self._torch_loader.batch_size

    def __len__(self) -> int:
        """Number of optimizer steps in an epoch; in evaluation mode, number of iterations of the loop."""
        if self._accelerator.is_training:
            return len(self.loader)
        size, world = self._torch_loader.batch_size or 1, self._accelerator.world
        return math.ceil(len(self._evaluation_order()) / (size * world.size))

    def __iter__(self) -> Iterator[Any]:
        self._is_training = self._accelerator.is_training
        self.is_stepped |= self._is_training
        with self._accelerator.iteration(self):
            for data in self._accelerator.train_on(self) if self._is_training else self._evaluate():
                self.has_inner_loop = False
                yield data

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the order depends on seed and epoch of the position."""

    def state(self) -> dict[str, Any] | None:
        """Return the position and the settings on which batches depend; None for a loader without steps."""
        return SamestepDataLoader(self.loader, self.dataset, is_training=True).state_dict() if self.is_stepped else None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            CheckpointError: the data or their batches are others than those of the checkpoint.
        """
        SamestepDataLoader(self.loader, self.dataset, is_training=True).load_state_dict(state)
        self.is_stepped = True

    def _evaluation_order(self) -> Order:
        loader, seed = self._torch_loader, self._accelerator.seed
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            raise integration_error(
                "an evaluation with a batch sampler, or without batches",
                "batches of one size, of which each process computes every so many",
                "DataLoader(dataset, batch_size=64), with sampler= for another order",
            )
        options, dataset = order_options(loader.sampler), loader.dataset
        order: Order
        if "sampler" in options:
            order = drawn_order(options["sampler"], dataset, seed=seed, epoch=0)
        else:
            order = global_order(len(dataset), seed=seed, epoch=0, shuffle=bool(options))  # type: ignore[arg-type]
        return order[: len(order) - len(order) % loader.batch_size] if loader.drop_last else order

    def _evaluate(self) -> Iterator[Any]:
        """Yield every n-th batch of n processes; a process without one at the end computes the first batch again."""
        owner, loader = self._accelerator, self._torch_loader
        order, size, world = self._evaluation_order(), loader.batch_size, owner.world
        assert size is not None
        if len(order) == 0:  # drop_last
            return
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        numbers = range(world.rank, math.ceil(len(batches) / world.size) * world.size, world.size)
        own = numpy.concatenate([batches[number if number < len(batches) else 0] for number in numbers])
        # Each process loads its own batches, as the only one.
        alone = World(0, 1, world.device, world.context)
        data = Loader(
            loader.dataset,  # type: ignore[arg-type]
            batch_size=size,
            microbatches=1,
            world=alone,
            seed=owner.seed,
            sampler=own.tolist(),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
        )
        with preserved_generators(world.device):
            for number, batch in zip(numbers, data.complete_epoch(), strict=True):
                self._is_filler = number >= len(batches)
                seed_generators(microbatch_seed("evaluation", owner.seed, 0, number), world.device)
                yield batch.local_microbatches[0].data
