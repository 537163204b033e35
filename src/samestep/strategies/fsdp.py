"""Fully sharded data parallel: torch's FSDP2, over all ranks (`fsdp`) or within groups of ranks (`hsdp`).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from samestep.config import StrategyConfig
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.world import World
from samestep.errors import InputError, UnusedParameterError
from samestep.microbatches import owned_microbatches
from samestep.reduce.tree import MicrobatchTree, Node, communicate, tree_all_reduce
from samestep.strategies.local_parameters import Division, LocalParameters
from samestep.strategies.reduction import ExactReduction, Reduction
from samestep.strategies.strategy import Strategy

_MAX_UNITS = 200  # each unit is one message in forward and one in backward


def shard_model(model: nn.Module, world: World, *, is_exact: bool, is_engine: bool = True) -> None:
    """Shard the parameters of `model` among the ranks of the shard axis, in place.

    With `is_exact`, FSDP does not sum over copies of the model: `TreeReduceScatter` does. The engine needs all
    parameters divided, and hooks around FSDP's.

    Raises:
        InputError: the model has a parameter that FSDP cannot divide.
    """
    config, mesh = world.strategy, world.mesh
    assert mesh is not None
    if is_engine:
        _require_divisible(model, world)
    axes = mesh["replicate", "shard"] if world.mesh_shape.replicate > 1 and not is_exact else mesh["shard"]
    values = _move_to_meta(model, world) if config.meta else {}
    ignored: set[nn.Parameter] = set()
    if not is_engine:
        ignored = {one for one in model.parameters() if one.dim() == 0 or not one.is_contiguous()}
    # Without a GPU, pinned memory cannot be allocated.
    offload = CPUOffloadPolicy(pin_memory=is_accelerator(world.device)) if config.offload else OffloadPolicy()
    for module, precision in _with_precision([*shard_units(model), model], config):
        if is_engine:
            module.register_forward_hook(_clone_views)  # before the hook of fully_shard, which needs its result
        fully_shard(module, mesh=axes, mp_policy=precision, offload_policy=offload, ignored_params=ignored)
    if is_engine:
        model.register_forward_pre_hook(_reshard_root, prepend=True)  # before the hook of fully_shard, which gathers
    if config.meta:
        model.to_empty(device="cpu" if config.offload else world.device)
        _move_buffers(model, world.device)
        _materialize(model, values, world)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The engine divides by the global count, and gloo has no reduction that divides.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _require_divisible(model: nn.Module, world: World) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 or not parameter.is_contiguous():
            raise InputError(
                f"the mesh {world.mesh_shape.name} with the parameter {name} of the shape {tuple(parameter.shape)}",
                expected="contiguous parameters with at least one dimension, which ranks divide by rows",
                fix="torch.ones(1) in place of a scalar; no step.channels_last; or --strategy ddp",
                code="E_INCOMPATIBLE",
            )


def _move_to_meta(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Move a model to the meta device and return its values by name on rank 0, none on other ranks."""
    named = list(model.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) < len(named):
        raise InputError(
            "strategy.meta with a model that uses a parameter under two names",
            expected="every parameter has one name: values are broadcast by name",
            fix="remove strategy.meta",
            code="E_META",
        )
    values = {name: tensor.detach() for name, tensor in _named_tensors(model)} if world.is_main else {}
    if any(tensor.is_meta for tensor in values.values()):
        raise InputError(
            "the model has no values on rank 0",
            expected="strategy.meta: rank 0 builds the model with values, other ranks on the meta device",
            fix="with torch.device('meta') if world.rank else nullcontext(): model = ...",
            code="E_META",
        )
    model.to("meta")
    return values


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device that computes, where FSDP expects them with `offload` too."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _materialize(model: nn.Module, values: Mapping[str, torch.Tensor], world: World) -> None:
    """Fill a sharded model with the values of rank 0, one tensor at a time: no device ever holds the complete model."""
    for name, tensor in _named_tensors(model):
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            full.copy_(values[name])
        world.broadcast(full)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(Division.of(tensor).local_part(full))
            else:
                tensor.copy_(full)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together and released after use.

    These are the elements of module lists (blocks of a transformer), or the children of a model without lists. Small
    modules, and parameters that several units use, belong to the root and are gathered once per forward.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    elements = dict.fromkeys(element for elements in lists for element in elements)
    nested = {child for element in elements for child in element.modules() if child is not element}
    units = [element for element in elements if element not in nested] or list(model.children())
    users = Counter(parameter for module in units for parameter in set(module.parameters()))
    min_size = sum(parameter.numel() for parameter in model.parameters()) / _MAX_UNITS
    return [
        module
        for module in units
        if sum(p.numel() for p in module.parameters()) > min_size and all(users[p] == 1 for p in module.parameters())
    ]


def _with_precision(
    modules: Sequence[nn.Module], config: StrategyConfig
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Iterate over modules, innermost first and the model last, with their policies; reductions are in float32."""
    full, half = torch.float32, torch.bfloat16
    if config.gather == "fp32":
        yield from ((module, MixedPrecisionPolicy()) for module in modules)
        return
    norms = [norm for norm in modules[-1].modules() if isinstance(norm, _BatchNorm) and list(norm.parameters())]
    # Running statistics are float32, and torch's batch norm requires one dtype for all arguments.
    yield from ((norm, MixedPrecisionPolicy(full, full, output_dtype=half)) for norm in norms)
    yield from ((module, MixedPrecisionPolicy(half, full)) for module in modules[:-1] if module not in norms)
    yield modules[-1], MixedPrecisionPolicy(half, full, output_dtype=full)


@dataclass
class _Backward:
    """The backward in progress.

    Attributes:
        tree: the tree of the step.
        node: place of the microbatch in the tree; None for a filler, whose gradients are not counted.
        last: the backward is the last one of this rank.
    """

    tree: MicrobatchTree
    node: Node | None
    last: bool


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter of one unit's gradients in the order of `MicrobatchTree`.

    FSDP calls this object once per backward. Gradients of all but the last microbatch are kept and added in tree order.
    In the last backward each rank receives its part of every subtree sum of the shard axis, as many bytes as in a ring
    reduce-scatter if each rank owns one subtree. Copies of the model (`hsdp`) then add their parts.

    Args:
        data: ranks that share the data.
        shards: ranks of the shard axis.
        copies: ranks with the same shard of other copies of the model, if there are any.
    """

    def __init__(self, data: World, shards: World, copies: World | None) -> None:
        self._data, self._shards, self._copies = data, shards, copies
        self._sums: dict[Node, torch.Tensor] = {}
        self.backward: _Backward | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gradients of a unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum to `output_tensor`, zeros before the last backward.

        Args:
            output_tensor: one part; zeros outside of a step of the engine.
            input_tensor: the parts of all ranks of the shard axis, in order; overwritten.
            group: the shard axis.
            op: a sum.
            async_op: false.
        """
        if self.backward is None:  # in a step of another engine, such as that of a generator through its critic
            output_tensor.zero_()
            return
        tree = self.backward.tree
        if is_accelerator(input_tensor.device):
            # The memory is of the stream of the backward, which would reuse it before the sums of this stream are done.
            input_tensor.record_stream(accelerator_module().current_stream(input_tensor.device))
        if self.backward.node is not None:
            self._require(all(kept.shape == input_tensor.shape for kept in self._sums.values()))
            values, self._sums = {**self._sums, self.backward.node: input_tensor}, {}
            for node in tree.cover(self._data.rank, self._data.shares):
                self._sums |= tree.merge(node, values, _add)
        if not self.backward.last:
            output_tensor.zero_()
            return
        # FSDP makes no call for a microbatch in which no parameter of the unit has a gradient.
        self._require(all(node in self._sums for node in tree.cover(self._data.rank, self._data.shares)))
        sums = self._scatter(tree, output_tensor)
        if self._copies is not None:
            total = sums[0] if sums else torch.zeros_like(output_tensor)
            sums = [tree_all_reduce(self._copies, tree, sums, total)]
        output_tensor.copy_(sums[0])

    def clear(self) -> None:
        """Drop the gradients that are kept."""
        self._sums, self.backward = {}, None

    def _require(self, is_complete: bool) -> None:
        if not is_complete:
            raise UnusedParameterError(
                "a parameter received a gradient from some microbatches only",
                expected="every parameter that requires a gradient receives one from every microbatch",
                fix="find the branch of the forward that depends on the data; add the unused part with a factor of 0",
            )

    def _scatter(self, tree: MicrobatchTree, part: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of the sums of its copy of the model, one per subtree that the copy owns."""
        rank, size = self._shards.rank, self._shards.size
        first = self._data.rank - rank  # data ranks of a copy are consecutive
        covers = [tree.cover(first + shard, self._data.shares) for shard in range(size)]
        parts = [self._sums[node].view(size, -1) for node in covers[rank]]
        rows = {peer: part.new_empty(len(covers[peer]), part.numel()).unbind() for peer in range(size) if peer != rank}
        peers = [(rank + offset) % size for offset in range(1, size)]
        sent = [(rows_of_sum[peer], peer) for peer in peers for rows_of_sum in parts]
        received = [(row, peer) for peer in peers for row in rows[peer]]
        self._shards.run_collective(lambda: communicate(self._shards, sent, received), "a reduce-scatter")
        rows[rank] = tuple(rows_of_sum[rank] for rows_of_sum in parts)
        values = {node: row for shard in range(size) for node, row in zip(covers[shard], rows[shard], strict=True)}
        copies = self._copies.shares if self._copies is not None else 1
        return [tree.merge(node, values, _add)[node] for node in tree.cover(self._data.rank // size, copies)]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return right.add_(left)


class FsdpStrategy(Strategy):
    """Parameters are gathered before use; gradients are reduced and scattered during the last microbatch's backward."""

    defers_gradients = True

    def __init__(self, model: nn.Module, local_parameters: LocalParameters, reduction: Reduction, world: World) -> None:
        assert isinstance(model, FSDPModule)
        super().__init__(world.mesh_shape.name, model, reduction)
        self._root, self._local_parameters, self._data = model, local_parameters, world.data
        self._units: list[TreeReduceScatter] = []
        self._computed = 0  # microbatches of this rank in this step
        if isinstance(reduction, ExactReduction):
            shards, copies = _worlds_of_axes(world)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    self._units.append(TreeReduceScatter(world.data, shards, copies))
                    module.set_custom_reduce_scatter(self._units[-1])

    @contextmanager
    def microbatch(self, tree: MicrobatchTree, microbatch: int, *, last: bool) -> Iterator[None]:
        owned = owned_microbatches(tree.microbatches, self._data.shares, self._data.rank)
        own = [number for number in owned if tree.has_samples((number, number + 1))]
        is_filler = self._computed >= len(own)
        for unit in self._units:
            unit.backward = _Backward(tree, None if is_filler else (microbatch, microbatch + 1), last)
        self._root.set_requires_gradient_sync(last or bool(self._units))
        yield
        self._computed += 1
        if last:
            self._local_parameters.take_gradients()
        elif self._units:
            self._local_parameters.drop_gradients()

    def finish(self, tree: MicrobatchTree) -> None:
        self._clear()
        super().finish(tree)

    def abandon(self) -> None:
        self._clear()
        self._root.set_requires_gradient_sync(True)

    def _clear(self) -> None:
        self._computed = 0
        for unit in self._units:
            unit.clear()


def _worlds_of_axes(world: World) -> tuple[World, World | None]:
    """Return the ranks of the shard axis, and of the axis of copies if there is one; connect them, a collective."""
    assert world.mesh is not None
    shards, copies = world.subworld(world.mesh.get_group("shard")), None
    if world.mesh_shape.replicate > 1:
        shares, size = world.data.uneven_shares, shards.size
        of_copies = shares and tuple(sum(shares[first : first + size]) for first in range(0, len(shares), size))
        copies = world.subworld(world.mesh.get_group("replicate"), of_copies)
    for axis in (shards, copies):
        _ = axis and axis.sockets
    return shards, copies


def _reshard_root(module: nn.Module, inputs: Any) -> None:
    """Free gathered parameters of the root, which FSDP keeps after a forward until a backward.

    After a forward without a backward, the next forward would use them again, but the shards can have other values by
    then: those of the moving average, or of a checkpoint.
    """
    assert isinstance(module, FSDPModule)
    if torch._C._current_graph_task_id() == -1:  # not in a forward of activation checkpointing within a backward
        module.reshard()


def _clone_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Clone outputs that are views: an in-place change of a view would detach the hook that gathers parameters."""
    return tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) and value._is_view() else value, outputs
    )
