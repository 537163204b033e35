"""Interface of strategies, models that they support, and the strategies without DDP that keep a complete model."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from samestep.config import StepConfig
from samestep.distributed.world import World, gather_numbers
from samestep.errors import InputError
from samestep.reduce.tree import MicrobatchTree, Node
from samestep.strategies.local_parameters import LocalParameters
from samestep.strategies.reduction import Reduction

_WRAPPERS = {
    DistributedDataParallel: "pass the wrapped module, model.module: the engine reduces gradients itself",
    DataParallel: "pass the wrapped module, model.module, and samestep.start(strategy=StrategyConfig('dp')) if one "
    "process shall use several devices",
    FullyShardedDataParallel: "pass the model without wrapper, and choose --strategy fsdp",
    FSDPModule: "pass the model before fully_shard, and choose --strategy fsdp",
    torch.jit.ScriptModule: "pass the model without torch.jit, and StepConfig(compile=True)",
}

Sum = Callable[[], torch.Tensor]  # waits for a sum, and returns it


class Strategy(ABC):
    """Computation of the microbatches of a global batch and summation of their gradients.

    In a step, `microbatch` surrounds forward and backward of each microbatch of this rank, in ascending order; `finish`
    ends the step. `tests/conformance/test_strategies.py` checks every implementation.

    Attributes:
        name: as in the recipe and the documentation.
        module: the model that the training forward calls.
        defers_gradients: no gradient is visible before the last microbatch of this rank is complete.
        defers_reduction: in this step, gradients are reduced after backward of all microbatches.
        uses_replicas: in this step, gradients are those of replicas of the model.
        batchable: the microbatches of a rank whose gradients may be set in place of a backward, if any.
    """

    defers_gradients = False
    defers_reduction = False
    uses_replicas = False
    batchable: slice | None = None

    def __init__(self, name: str, module: torch.nn.Module, reduction: Reduction) -> None:
        self.name, self.module, self._reduction = name, module, reduction

    @property
    def forward_communicates(self) -> bool:
        """Whether the next forward, or `prepare_backward` after it, communicates."""
        return False

    @abstractmethod
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> AbstractContextManager[None]:
        """Surround forward and backward of one microbatch; `last` marks the last one of this rank."""

    def prepare_backward(self) -> None:  # noqa: B027  # most strategies need no preparation
        """Prepare the reduction of gradients during a backward: after its forward, before `sum_vectors`.

        Without this call, the backward must be that of a step with `defers_reduction`.
        """

    def add_gradients(self, tree: MicrobatchTree, microbatch: int) -> None:
        """Move gradients of an earlier microbatch from `.grad` to the sums, inside `microbatch` of the last one."""
        self._reduction.accumulate(tree, microbatch)

    def sum_vectors(self, tree: MicrobatchTree, vectors: Mapping[Node, torch.Tensor], length: int) -> Sum:
        """Start the sum of float64 vectors of `length`, of microbatches or subtrees, over all ranks.

        Every rank calls this once per step: between forward and backward of its last microbatch, or before `finish` if
        it has no microbatch.
        """
        total = self._reduction.reduce_vector(tree, vectors, length)
        return lambda: total

    def abandon(self) -> None:
        """Drop the sums of a failed step."""
        self._reduction.clear()

    def close(self) -> None:  # noqa: B027  # most strategies hold nothing
        """Release what refers to the parameters, before another strategy is built."""

    def finish(self, tree: MicrobatchTree) -> None:
        """Complete `.grad` of each trained parameter: the sum over all microbatches, on every rank.

        Raises:
            PeerLostError: another rank ended during the step.
        """
        self._reduction.clear()


class SingleStrategy(Strategy):
    """One rank that owns all microbatches; no communication."""

    batchable = slice(None)

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
        self._reduction.set_total(tree)


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
            code="E_RANK_MISMATCH",
        )
    for tensor in tensors.values():
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        world.broadcast(values)
        tensor.detach().copy_(values)


def require_plain_model(model: torch.nn.Module, config: StepConfig) -> None:
    """Refuse models whose results would depend on the number of ranks, and parameters that cannot be reduced.

    Raises:
        InputError: the model is wrapped, or has such layers or parameters.
    """
    # Imported if a module was compiled; the import is slow.
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    for name, module in model.named_modules():
        place = f"the module {name!r}" if name else "the model"
        wrapper = next(((kind.__name__, fix) for kind, fix in _WRAPPERS.items() if isinstance(module, kind)), None)
        if isinstance(module, compiled) or (module._compiled_call_impl is not None and not config.compile):
            wrapper = "torch.compile", "pass the model before torch.compile, and StepConfig(compile=True)"
        if wrapper is not None:
            raise InputError(
                f"{place} is wrapped in {wrapper[0]}",
                expected="a plain torch.nn.Module, which the engine wraps and compiles according to its options",
                fix=wrapper[1],
                code="E_WRAPPED_MODEL",
            )
        if isinstance(module, torch.nn.SyncBatchNorm) and config.batch_norm != "sync":
            raise InputError(
                f"{place} is a SyncBatchNorm, and step.batch_norm is {config.batch_norm}",
                expected="statistics of microbatches from BatchNorm layers, or of the global batch from either",
                fix='StepConfig(batch_norm="sync"), or layers of torch.nn.BatchNorm1d, 2d or 3d',
                code="E_BATCH_NORM",
            )
        is_table = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_table and module.sparse and module.weight.requires_grad:
            raise sparse_error(f"{name}.weight" if name else "weight")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"{name!r} has no values yet",
                expected="the shapes of parameters are known before the engine is made",
                fix="compute one forward with a batch of the data before the optimizer and the engine are made",
                code="E_PARAMETER",
            )
        if isinstance(tensor, torch.nn.Parameter) and tensor.is_complex():
            raise InputError(
                f"the parameter {name!r} is complex",
                expected="real parameters",
                fix="a real parameter with a last dimension of 2, and torch.view_as_complex(parameter) in forward; "
                "optimizers of torch compute the same for both",
                code="E_PARAMETER",
            )


def sparse_error(name: str) -> InputError:
    """Return the error of a parameter with sparse gradients."""
    return InputError(
        f"{name!r} has sparse gradients",
        expected="dense gradients, which are summed over microbatches in a fixed order",
        fix="sparse=False, and a dense optimizer in place of SparseAdam",
        code="E_PARAMETER",
    )
