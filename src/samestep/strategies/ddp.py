"""Distributed data parallel: torch's DistributedDataParallel with a communication hook for the reduction."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from samestep.distributed.collective_check import is_lost_connection
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
from samestep.errors import PeerLostError
from samestep.reduce.tree import MicrobatchTree, Node
from samestep.strategies.reduction import Reduction, reduce_gradients
from samestep.strategies.strategy import Strategy, Sum

TensorFuture = torch.futures.Future[torch.Tensor]


class DdpStrategy(Strategy):
    """One replica of the model per rank; gradients are reduced during backward of the last microbatch.

    In the first step, they are reduced after backward. So they are in all steps if a parameter receives its gradient in
    several parts, as from reentrant activation checkpointing of a shared layer: DDP would send the first part.
    """

    batchable = slice(None, -1)  # the backward of the last one reduces gradients

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], reduction: Reduction, world: World
    ) -> None:
        self._parameters, self._world = parameters, world
        self._comm_stream = _CommStream(world.device)
        weakref.finalize(self, self._comm_stream.end)
        self._is_deferred, self._is_first, self._has_parts = True, True, False
        self._current: tuple[MicrobatchTree, int] | None = None
        self._shared_forwards = 0
        self._is_prepared = False  # DDP expects a gradient of every parameter
        # Emitted for parameters with a dimension of size 1, whose stride is arbitrary; costs one copy of the gradient.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        super().__init__("ddp", model, reduction)
        self._ddp = self._build_ddp()

    @property
    def forward_communicates(self) -> bool:
        # DDP builds its buckets anew, a collective, in the second step in which it reduces.
        return not (self._is_deferred or self.uses_replicas) and self._shared_forwards < 2

    @property
    def _reduces_after_backward(self) -> bool:
        return self._is_deferred or self.defers_reduction or self.uses_replicas

    @contextmanager
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> Iterator[None]:
        is_shared_by_all = tree.is_shared_by_all(self._world.shares) and not self._reduces_after_backward
        if last and is_shared_by_all:
            self._current = (tree, microbatch)
            try:
                with self._first_failure():
                    yield
            finally:
                self._current = None
            self._shared_forwards += 1
            self._is_prepared = False
            return
        # DDP would wait for a rank without samples. Then all ranks reduce in `finish`.
        with _gradient_parts(self._parameters if self._is_first else ()) as parts:
            yield
        self._has_parts |= max(parts.values(), default=0) > 1
        self._reduction.accumulate(tree, microbatch)

    def prepare_backward(self) -> None:
        if self._current is not None:
            self._is_prepared = True
            self._ddp(None)

    def sum_vectors(self, tree: MicrobatchTree, vectors: Mapping[Node, torch.Tensor], length: int) -> Sum:
        future = self._comm_stream.submit(lambda: self._reduction.reduce_vector(tree, vectors, length))
        return partial(_wait, future, vectors)

    def close(self) -> None:
        del self._ddp, self.module  # the reducer keeps shapes and types of parameters in the autograd graph

    def finish(self, tree: MicrobatchTree) -> None:
        if self._reduces_after_backward or not tree.is_shared_by_all(self._world.shares):
            with self._first_failure():
                reduce_gradients(self._parameters, lambda bucket: self._reduce_accumulated(tree, bucket))
        if self._is_first and not self.uses_replicas:  # all ranks must reduce in the same way
            has_parts = torch.tensor([float(self._has_parts)], device=self._world.device)
            with self._first_failure():
                self._comm_stream.submit(lambda: self._all_reduced(has_parts)).wait()
            self._is_deferred, self._is_first = bool(has_parts > 0), False
        super().finish(tree)

    def abandon(self) -> None:
        self._comm_stream.drain()  # the buckets that were handed to it need the sums
        super().abandon()
        if self._is_prepared:  # DDP would wait for the missing gradients in the next step
            self._is_prepared, self._shared_forwards = False, 0
            del self._ddp  # with its hooks, before the new one has any
            self._ddp = self._build_ddp(init_sync=False)

    def reduce_bucket(self, bucket: dist.GradBucket) -> TensorFuture:
        """Start the reduction of a bucket of DDP, in backward of the last microbatch."""
        assert self._current is not None
        tree, last = self._current
        parameters, flat = cast(list[torch.nn.Parameter], bucket.parameters()), bucket.buffer()
        return self._comm_stream.submit(lambda: self._reduction.reduce_bucket(tree, last, parameters, flat))

    def _build_ddp(self, **options: bool) -> DistributedDataParallel:
        # The engine averages buffers over microbatches; torch 2.13 renamed the argument that disables their broadcast.
        known = inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        device = self._world.device
        ddp = DistributedDataParallel(
            _Parameters(self.module),
            device_ids=[device] if is_accelerator(device) else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._world.strategy.bucket_mb,
            **options,  # type: ignore[arg-type]
        )
        # A weak reference: torch's reducer holds the state, and the garbage collector does not see references in C++.
        ddp.register_comm_hook(weakref.ref(self), _reduce_bucket)
        return ddp

    def _all_reduced(self, tensor: torch.Tensor) -> torch.Tensor:
        self._world.all_reduce(tensor)
        return tensor

    def _reduce_accumulated(self, tree: MicrobatchTree, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        return self._comm_stream.submit(lambda: self._reduction.reduce_accumulated(tree, parameters)).wait()

    @contextmanager
    def _first_failure(self) -> Iterator[None]:
        """Raise the cause of a failed future, which backward does not report."""
        try:
            yield
        except RuntimeError as error:
            self._comm_stream.raise_failure()
            if is_lost_connection(error):
                raise PeerLostError(f"rank {self._world.rank} lost its connection: {error}") from error
            raise


class _Parameters(torch.nn.Module):
    """The parameters of a model for DDP, whose forward only prepares the reduction: the engine calls the model itself.

    A user's forward function may call parts of the model, which DDP does not allow.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, unused: None) -> None:
        """Compute nothing. DDP requires an argument on a GPU."""


def _wait(future: TensorFuture, operands: object) -> torch.Tensor:
    """Return a result; until then, `operands` keep their memory, which another stream may still read."""
    return future.wait()


def _reduce_bucket(strategy: weakref.ref[DdpStrategy], bucket: dist.GradBucket) -> TensorFuture:
    current = strategy()
    assert current is not None
    return current.reduce_bucket(bucket)


@contextmanager
def _gradient_parts(parameters: Sequence[torch.nn.Parameter]) -> Iterator[Counter[int]]:
    """Count the parts in which each parameter receives its gradient."""
    parts: Counter[int] = Counter()
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: parts.update([number]))
        for number, parameter in enumerate(parameters)
    ]
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()


class _CommStream:
    """Collectives in submission order, concurrent with computation.

    A reduction in tree order takes several dependent messages, and every rank must issue them in the same order. On a
    CPU, a thread issues them during backward; on a GPU, a stream, without a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._failure: Exception | None = None
        if is_accelerator(device):
            self._stream = accelerator_module().Stream(device)
        else:
            self._queue: SimpleQueue[tuple[TensorFuture, Callable[[], torch.Tensor]] | None] = SimpleQueue()
            # A daemon thread: a failed rank must be able to exit while a receive is pending.
            Thread(target=self._run, name="samestep-comm-stream", daemon=True).start()

    def submit(self, communicate: Callable[[], torch.Tensor]) -> TensorFuture:
        """Run `communicate` after all earlier submissions and return its result as a future."""
        future: TensorFuture = torch.futures.Future(devices=[self._device] if is_accelerator(self._device) else None)
        if not is_accelerator(self._device):
            self._queue.put((future, communicate))
            return future
        self._stream.wait_stream(accelerator_module().current_stream(self._device))
        with accelerator_module().stream(self._stream):
            try:
                # A future records the stream of `set_result`; `wait` waits for that stream.
                future.set_result(communicate())
            except Exception as error:  # backward would lose its type
                self._failure = self._failure or error
                raise
        return future

    def drain(self) -> None:
        """Wait for all earlier submissions, whose errors are not raised; on a GPU, the current stream waits."""
        if is_accelerator(self._device):
            accelerator_module().current_stream(self._device).wait_stream(self._stream)
        else:
            self.submit(lambda: torch.empty(0)).wait()

    def raise_failure(self) -> None:
        """Raise the first error, which is the cause of later ones."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """End the thread."""
        if not is_accelerator(self._device):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, communicate = item
            try:
                future.set_result(communicate())
            except Exception as error:  # boundary: the thread has no caller; the future carries the error
                self._failure = self._failure or error
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own signature is wrong
            del item, future, communicate  # hold the strategy until the next item otherwise
