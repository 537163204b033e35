"""Ranks of a run: sizes, device, process groups, mesh and collectives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.config import StrategyConfig, resolve_mesh
from samestep.config.strategy import AXES, MeshShape
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator
from samestep.distributed.local_sockets import LocalSockets, connect_locally
from samestep.distributed.signals import StopRequest
from samestep.distributed.status import RankStatus, local_rank_status
from samestep.distributed.torch_errors import is_lost_connection
from samestep.errors import InputError, PeerLostError
from samestep.microbatches import Shares


class StepLogger(Protocol):
    """Destination of the metrics of steps, such as a `samestep.loggers.logger.Logger`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of an optimizer step."""


@dataclass(frozen=True)
class RunContext:
    """Mutable state of this rank that all worlds of a run share."""

    status: RankStatus  # current activity of this rank, read by the launcher
    stop: StopRequest  # request to end at the next step boundary
    collective_check: CollectiveCheck  # check that all ranks issue the same operations
    loggers: tuple[StepLogger, ...] = ()  # loggers of `World.log`; empty on ranks other than 0
    resources: ExitStack = field(
        default_factory=ExitStack
    )  # loggers and run directory; end before the ranks part
    session: ExitStack = field(
        default_factory=ExitStack
    )  # of a world of `samestep.init`, which ends with it

    @classmethod
    def local(cls, stop: StopRequest | None = None) -> RunContext:
        """Return a context without other ranks."""
        status = local_rank_status()
        check = CollectiveCheck(dist.HashStore(), status, rank=0, size=1, timeout=timedelta())
        return cls(status, stop or StopRequest(), check)


# Of the first message of `all_gather`.
_LENGTH_BYTES = 8
_FEW_DATA_BYTES = 504
_FEW_BYTES = 2**16  # every rank sends its values to every other one


@dataclass(frozen=True, eq=False)
class World:
    """Ranks of a run, as one of the ranks sees them.

    A world of size 1 has a process group like any other, so no code distinguishes the two cases.

    Attributes:
        rank: rank of this process, from 0.
        size: number of ranks.
        device: device of this rank.
        context: status, stop request and collective check of this rank.
        group: process group of these ranks; None for the default group.
        strategy: parallel strategy.
        mesh: device mesh of the strategy; None for plain replication.
        timeout: time limit of a collective.
        data_world: ranks that share the data, this rank among them, if these are not all ranks.
        uneven_shares: share of the microbatches of each rank that shares the data; None for equal
            shares.
        is_private: `group` has all ranks, and the script does not see it.
    """

    rank: int
    size: int
    device: torch.device
    context: RunContext = field(default_factory=RunContext.local)
    group: dist.ProcessGroup | None = None
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    mesh: DeviceMesh | None = None
    timeout: timedelta = dist.default_pg_timeout
    data_world: World | None = None
    uneven_shares: tuple[int, ...] | None = None
    is_private: bool = False

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the world, if `samestep.init` has returned it."""
        self.context.session.__exit__(kind, error, at)

    @property
    def shares(self) -> Shares:
        """Shares of the ranks that share the data, in the microbatches."""
        return self.uneven_shares or self.size

    @cached_property
    def mesh_shape(self) -> MeshShape:
        """Sizes of the mesh axes."""
        return resolve_mesh(self.strategy, self.size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of these ranks.

        Its methods need no default group, as functions of `torch.distributed` do, which a script
        may not see.
        """
        group = self.group or dist.group.WORLD
        assert group is not None
        return group

    @cached_property
    def stages_messages(self) -> bool:
        """Whether messages between two ranks pass through host memory: gloo sends no memory of a GPU."""
        return (
            is_accelerator(self.device)
            and self.process_group._get_backend(self.device).name() == "gloo"
        )

    @cached_property
    def sockets(self) -> LocalSockets | None:
        """Connections for messages between two ranks of one machine that compute on CPUs; None otherwise.

        The first access is a collective.
        """
        return self.connect()

    def connect(self) -> LocalSockets | None:
        """Return new connections, for a thread that sends messages at the same time as another. A collective."""
        if self.size == 1 or is_accelerator(self.device):
            return None
        sockets = connect_locally(
            self.rank, self.size, self.timeout, lambda value: all_gather(value, self)
        )
        if sockets is not None:
            self.context.resources.callback(sockets.close)
        return sockets

    @property
    def data(self) -> World:
        """Ranks that share the data: all ranks, unless several ranks compute the same samples."""
        return self.data_world or self

    @property
    def coordinates(self) -> dict[str, int]:
        """Position of this rank on each axis of the mesh."""
        if self.mesh is None:
            return {"replicate": self.rank}
        return dict(zip(AXES, self.mesh.get_coordinate() or (), strict=True))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has received a request to end. Ranks agree on requests at the end of a step."""
        return self.context.stop()

    def subworld(
        self, group: dist.ProcessGroup, uneven_shares: tuple[int, ...] | None = None
    ) -> World:
        """Return the world of the ranks of `group`, which contains this rank."""
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        return World(
            rank,
            size,
            self.device,
            self.context,
            group,
            timeout=self.timeout,
            uneven_shares=uneven_shares,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics with the loggers of `samestep.init`. Only rank 0 logs; other ranks return at once."""
        for logger in self.context.loggers:
            logger.log(step, values)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over ranks in place, in the backend's order of summation."""
        self._begin("all-reduce")
        self.run_collective(lambda: dist.all_reduce(tensor, group=self.group), "an all-reduce")

    def combine(self, values: torch.Tensor, operation: Literal["sum", "max"] = "sum") -> None:
        """Reduce values in place if the result does not depend on the order: maxima, or sums without rounding.

        Ranks that compute on CPUs of one machine send a few values over `sockets`, in the thread
        that uses these.
        """
        sockets = self.sockets if values.nbytes <= _FEW_BYTES else None
        if sockets is None:
            reduction = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
            self.run_collective(
                lambda: dist.all_reduce(values, reduction, group=self.group), "an all-reduce"
            )
            return
        rows = values.new_empty(self.size, *values.shape)
        self.run_collective(
            lambda: sockets.all_gather(values, rows, range(self.size)), "an all-gather"
        )
        torch.sum(rows, 0, out=values) if operation == "sum" else torch.amax(rows, 0, out=values)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcast a contiguous tensor of any dtype from the rank `source`, in place."""
        self._begin("broadcast")
        if tensor.numel() > 0:
            raw = tensor.flatten().view(
                torch.uint8
            )  # bytes: the backend does not support every dtype
            self.run_collective(
                lambda: dist.broadcast(raw, group=self.group, group_src=source), "a broadcast"
            )

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._begin("barrier")
        self.run_collective(lambda: dist.barrier(group=self.group), "a barrier")

    def _begin(self, collective: str) -> None:
        if self.group is None or self.is_private:
            self.context.collective_check.begin_collective(collective)

    def run_collective(self, collective: Callable[[], Any], name: str) -> None:
        """Run a collective, with `name` in the status of this rank, and convert a connection failure.

        Raises:
            PeerLostError: the backend cannot reach another rank.
            RuntimeError: the collective failed for another reason, such as a lack of memory.
        """
        try:
            with self.context.status.waiting(name):
                collective()
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise PeerLostError(
                f"rank {self.rank} lost its connection to another rank: {error}"
            ) from error


def build_world(
    rank: int,
    size: int,
    device: torch.device,
    context: RunContext,
    strategy: StrategyConfig,
    timeout: timedelta,
) -> World:
    """Create the process groups and the mesh of a strategy. Collective: every rank calls it.

    Plain replication needs no group but the default one.

    Raises:
        InputError: the strategy has no mesh for this number of ranks.
    """
    shape = resolve_mesh(strategy, size)
    shares = strategy.shares if strategy.shares and size > 1 else None
    if not shape.splits_model:
        return World(
            rank, size, device, context, strategy=strategy, timeout=timeout, uneven_shares=shares
        )
    from torch.distributed.tensor import (
        _redistribute,
        debug,
    )  # lazy: plain replication does without

    # torch takes meshes with equal ranks and names for equal: its caches of an earlier world in
    # this process would call groups that no longer exist, or other groups of the same names.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    ranks = torch.arange(shape.size).view(shape.sizes)
    # Groups of our own: the groups that torch creates for a mesh have a timeout of 30 minutes.
    axes = [
        _create_groups(rank, ranks.movedim(axis, -1).reshape(-1, length), timeout)
        for axis, length in enumerate(shape.sizes)
    ]
    mesh = DeviceMesh.from_group(axes, device.type, ranks, mesh_dim_names=AXES)
    data_world = None
    if shape.data_size < size:
        dims = [AXES.index("replicate"), AXES.index("shard")]
        group = _create_groups(
            rank, ranks.movedim(dims, [-2, -1]).reshape(-1, shape.data_size), timeout
        )
        rank_of_data = dist.get_rank(group)
        data_size = dist.get_world_size(group)
        data_world = World(
            rank_of_data, data_size, device, context, group, timeout=timeout, uneven_shares=shares
        )
        shares = None  # these ranks have none of their own
    return World(
        rank,
        size,
        device,
        context,
        strategy=strategy,
        mesh=mesh,
        timeout=timeout,
        data_world=data_world,
        uneven_shares=shares,
    )


def _create_groups(rank: int, rows: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Create one group per row of ranks, on every rank in the same order, and return the group of `rank`."""
    if len(rows) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [dist.new_group(row, timeout=timeout) for row in rows.tolist()]
    own: dist.ProcessGroup = next(
        g for g, row in zip(groups, rows.tolist(), strict=True) if rank in row
    )
    return own


# Gather and reduce small values over ranks, as JSON and bytes instead of pickle.


def all_gather(value: Any, world: World) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective.

    Args:
        value: a dense tensor, whose shape and dtype may differ between ranks; or a JSON value:
            number, string, boolean, None, or lists and string-keyed mappings of these. Tensors
            arrive on the device of the rank, without gradient; tuples arrive as lists.
        world: the ranks.

    Raises:
        InputError: `value` is neither a tensor nor a JSON value.
        PeerLostError: another rank ended.
    """
    data = _tensor_bytes(value) if isinstance(value, torch.Tensor) else _json_bytes(value)
    world._begin("all-gather")
    # The first message has the length, and the data if it fits. No copy of large data is made for
    # the length.
    few = data if len(data) <= _FEW_DATA_BYTES else b""
    rows = _gather_bytes(
        len(data).to_bytes(_LENGTH_BYTES, "little") + few, _LENGTH_BYTES + _FEW_DATA_BYTES, world
    )
    lengths = [int.from_bytes(_bytes(row[:_LENGTH_BYTES]), "little") for row in rows]
    if max(lengths) > _FEW_DATA_BYTES:
        rows = _gather_bytes(data, max(lengths), world)
    else:
        rows = [row[_LENGTH_BYTES:] for row in rows]
    received = (_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True))
    return [
        _tensor(data).to(world.device) if data.startswith(_TENSOR) else json.loads(data)
        for data in received
    ]


def _gather_bytes(data: bytes, length: int, world: World) -> list[torch.Tensor]:
    own = torch.zeros(length, dtype=torch.uint8)  # on the CPU: no wait for a GPU
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world.size)]
    world.run_collective(lambda: dist.all_gather(rows, own, group=world.group), "an all-gather")
    return rows


def _bytes(row: torch.Tensor) -> bytes:
    return row.numpy().tobytes()


_TENSOR = b"\0"  # first byte of a tensor, and end of its header; JSON text has no such byte


def _tensor_bytes(value: torch.Tensor) -> bytes:
    header = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)]).encode()
    elements = device_reads.copy(value.detach()).contiguous().reshape(-1)
    return _TENSOR + header + _TENSOR + elements.view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    _, header, elements = data.split(_TENSOR, 2)
    name, shape = json.loads(header)
    dtype: torch.dtype = getattr(torch, name)
    flat = (
        torch.frombuffer(bytearray(elements), dtype=dtype)
        if elements
        else torch.empty(0, dtype=dtype)
    )
    return flat.reshape(shape)


def _json_bytes(value: Any) -> bytes:
    try:
        data = json.dumps(value).encode()
        _require_string_keys(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"all_gather received a value that is not JSON: {error}",
            expected="a tensor, or numbers, strings, booleans, None, lists and string-keyed mappings",
            fix="send plain values, tensors one by one, and pairs instead of a mapping with numbers as keys",
            code="E_NOT_PICKLABLE",
        ) from error
    return data


Value = TypeVar("Value", float, torch.Tensor)


def reduce_dict(
    values: Mapping[str, Value],
    world: World,
    *,
    count: float = 1.0,
    reduce: Literal["mean", "sum"] = "mean",
) -> dict[str, Value]:
    """Return the mean of each value over ranks, weighted by `count`, or the sum. Collective.

    With the number of samples as `count`, the result is the mean over all samples, not a mean of
    means. All ranks get the same bits.

    Args:
        values: numbers, or tensors with the same shape on every rank; the same keys on every rank.
        world: the ranks.
        count: number of items behind the values of this rank; 0 for a rank without items, whose
            values are ignored.
        reduce: `mean`, or `sum` of the values, in which counts other than 0 have no weight.

    Raises:
        InputError: keys or shapes differ between ranks, the sum of counts is 0, or `reduce` is
        unknown.
    """
    if reduce not in ("mean", "sum"):
        raise InputError(
            f"reduce_dict: reduce is {reduce!r}",
            "mean or sum",
            'reduce="mean"',
            code="E_REDUCE_DICT",
        )
    shapes = {
        name: list(v.shape) if isinstance(v, torch.Tensor) else None
        for name, v in sorted(values.items())
    }
    rows = all_gather([shapes, count], world)
    for rank, (other, _) in enumerate(rows):
        if other != rows[0][0]:
            is_key = list(other) != list(rows[0][0])
            first, second = (
                ", ".join(row if is_key else map(str, row.values())) for row in (other, rows[0][0])
            )
            raise InputError(
                f"reduce_dict: rank {rank} has the {'keys' if is_key else 'shapes'} {first}, rank 0 has {second}",
                expected="the same keys and shapes on every rank",
                fix="pass 0 with count=0 on a rank without items",
                code="E_REDUCE_DICT",
            )
    counts = [count for _, count in rows]
    if not sum(counts) > 0:
        raise InputError(
            f"reduce_dict: the counts of all ranks sum to {sum(counts):g}",
            expected="a positive count on at least one rank",
            fix="count=1 for plain means",
            code="E_REDUCE_DICT",
        )
    weights, divisor = (
        (counts, sum(counts)) if reduce == "mean" else ([bool(count) for count in counts], 1)
    )
    numbers = all_gather([values[name] for name, shape in shapes.items() if shape is None], world)
    columns = dict(
        zip(
            (n for n, shape in shapes.items() if shape is None),
            zip(*numbers, strict=True),
            strict=True,
        )
    )
    reduced: dict[str, Any] = {}
    for name, shape in shapes.items():
        column = columns[name] if shape is None else all_gather(values[name], world)
        reduced[name] = (
            sum(value * weight for value, weight in zip(column, weights, strict=True) if weight)
            / divisor
        )
    return reduced


def _require_string_keys(value: Any) -> None:
    """Reject mappings with other keys than strings: JSON would silently convert the key 1 to "1"."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}")
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _require_string_keys(item)
