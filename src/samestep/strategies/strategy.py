"""Interface of strategies, and the strategies without DDP that keep a complete model on each rank."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch

from samestep.distributed.world import World, gather_numbers
from samestep.errors import InputError
from samestep.strategies.buckets import reduce_gradients
from samestep.strategies.local_parameters import LocalParameters
from samestep.strategies.reduction import MicrobatchTree, Reduction

TensorFuture = torch.futures.Future[torch.Tensor]


class Strategy(ABC):
    """Computation of the microbatches of a global batch and summation of their gradients.

    In a step, `microbatch` surrounds forward and backward of each microbatch of this rank, in ascending order; `finish`
    ends the step. `tests/conformance/test_strategies.py` checks every implementation.

    Attributes:
        name: as in the recipe and the documentation.
        module: called by the training forward.
        defers_gradients: no gradient is visible before the last microbatch of this rank is complete.
    """

    defers_gradients = False

    def __init__(self, name: str, module: torch.nn.Module, reduction: Reduction) -> None:
        self.name, self.module, self._reduction = name, module, reduction

    @abstractmethod
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> AbstractContextManager[None]:
        """Surround forward and backward of one microbatch; `last` marks the last one of this rank."""

    def sum_vectors(self, tree: MicrobatchTree, vectors: Mapping[int, torch.Tensor], length: int) -> TensorFuture:
        """Start the sum of one float64 vector of `length` per microbatch over all microbatches and ranks.

        Every rank calls this once per step: between forward and backward of its last microbatch, or before `finish` if
        it has no microbatch.
        """
        future: TensorFuture = torch.futures.Future()
        future.set_result(self._reduction.reduce_vector(tree, vectors, length))
        return future

    def abandon(self) -> None:
        """Drop the sums of a failed step."""
        self._reduction.clear()

    def finish(self, tree: MicrobatchTree) -> None:
        """Complete `.grad` of each trained parameter: the sum over all microbatches, on every rank.

        Raises:
            PeerLostError: another rank ended during the step.
        """
        self._reduction.clear()


class SingleStrategy(Strategy):
    """One rank that owns all microbatches; no communication."""

    @contextmanager
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> Iterator[None]:
        yield
        if last:
            self._reduction.reduce_local(tree, microbatch)
        else:
            self._reduction.accumulate(tree, microbatch)


class DeferredStrategy(Strategy):
    """Gradients are reduced after backward of all microbatches.

    For models whose forward and backward communicate. Two threads would have to issue their collectives in one order on
    all ranks, which the backend does not check. Therefore all communication is in the caller's thread, and DDP, which
    communicates during backward, is not used.
    """

    def __init__(
        self, model: torch.nn.Module, local_parameters: LocalParameters, reduction: Reduction, world: World
    ) -> None:
        super().__init__(world.mesh_shape.name, model, reduction)
        self._local_parameters = local_parameters
        if not local_parameters.is_divided:
            broadcast_model(model, world)

    @contextmanager
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> Iterator[None]:
        yield
        self._local_parameters.take_gradients()
        self._reduction.accumulate(tree, microbatch)

    def abandon(self) -> None:
        self._local_parameters.drop_gradients()
        super().abandon()

    def finish(self, tree: MicrobatchTree) -> None:
        reduce_gradients(self._local_parameters.names, lambda bucket: self._reduction.reduce_accumulated(tree, bucket))
        super().finish(tree)


def broadcast_model(model: torch.nn.Module, world: World) -> None:
    """Broadcast parameters and buffers from rank 0, as DDP does.

    Raises:
        InputError: names, shapes or dtypes differ between ranks, which the backend does not check.
    """
    if world.size == 1:
        return
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=4).digest()
    if len(set(gather_numbers(world, [int.from_bytes(digest, "little")]))) > 1:
        raise InputError(
            f"the parameters or buffers of the model of rank {world.rank} differ from another rank's",
            expected="every rank builds the same model",
            fix="build the model from values that are equal on all ranks",
            code="E_MODEL_DIFFERS",
        )
    for tensor in tensors.values():
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        world.broadcast(values)
        tensor.detach().copy_(values)
