"""Ranks of a run: sizes, device, process groups, mesh and collectives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Private: torch has no public way to hide a group.
from torch.distributed.distributed_c10d import _update_default_pg

from samestep.config import StrategyConfig, resolve_mesh
from samestep.config.strategy import AXES, MeshShape
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator
from samestep.distributed.local_sockets import LocalSockets, connect_locally
from samestep.distributed.status import RankStatus, local_rank_status
from samestep.distributed.stop_request import StopRequest
from samestep.distributed.torch_errors import is_lost_connection
from samestep.errors import InputError, PeerLostError

Result = TypeVar("Result")

# Of the first message of `all_gather`.
_LENGTH_BYTES = 8
_FEW_DATA_BYTES = 504
_TENSOR = b"\0"  # first byte of a tensor, and end of its header; JSON text has no such byte


@dataclass(frozen=True)
class Session:
    """State of one `samestep.init` in this process beside its ranks; all its worlds share it."""

    status: RankStatus  # current activity of this rank, read by the launcher
    stop: StopRequest  # request to end at the next step boundary
    collective_check: CollectiveCheck  # check that all ranks issue the same operations
    # `samestep.loggers.logger.Logger`s of `World.log`; empty on ranks other than 0.
    loggers: tuple[Any, ...] = ()
    options: Any = None  # `samestep.launcher.process_group.SessionOptions`
    # Loggers, run directory and settings, which end before the ranks part.
    resources: ExitStack = field(default_factory=ExitStack)
    exit_stack: ExitStack = field(default_factory=ExitStack)  # ends a world of `samestep.init`

    @classmethod
    def local(cls) -> Session:
        """Return a session without other ranks."""
        status = local_rank_status()
        check = CollectiveCheck(status, rank=0, size=1, timeout=timedelta())
        return cls(status, StopRequest(), check)


@dataclass(frozen=True, eq=False)
class World:
    """Ranks of a run, as one of the ranks sees them.

    A world of size 1 has a process group like any other, so no code distinguishes the two cases.

    Attributes:
        rank: rank of this process, from 0.
        size: number of ranks.
        device: device of this rank.
        session: status, stop request and loggers of this rank.
        group: process group of these ranks; None for the default group.
        strategy: parallel strategy.
        mesh: device mesh of the strategy; None for plain replication.
        timeout: time limit of a collective.
        data_world: ranks that share the data, this rank among them, if these are not all ranks.
        is_private: `group` has all ranks, and the script does not see it.
    """

    rank: int
    size: int
    device: torch.device
    session: Session = field(default_factory=Session.local)
    group: dist.ProcessGroup | None = None
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    mesh: DeviceMesh | None = None
    timeout: timedelta = dist.default_pg_timeout
    data_world: World | None = None
    is_private: bool = False

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: Any) -> None:
        """End the world, if `samestep.init` has returned it."""
        self.session.exit_stack.__exit__(*error)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def data(self) -> World:
        """Ranks that share the data: all, unless several ranks compute the same samples."""
        return self.data_world or self

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
        """Whether messages between two ranks pass through host memory: gloo sends none of a GPU."""
        backend = self.process_group._get_backend
        return is_accelerator(self.device) and backend(self.device).name() == "gloo"

    @cached_property
    def sockets(self) -> LocalSockets | None:
        """Connections between ranks that compute on CPUs of one machine; None otherwise.

        The first access is a collective.
        """
        return self.connect()

    def connect(self) -> LocalSockets | None:
        """Return new connections, for another thread that sends messages. A collective."""
        if self.size == 1 or is_accelerator(self.device):
            return None
        sockets = connect_locally(
            self.rank, self.size, self.timeout, lambda value: all_gather(value, self)
        )
        if sockets is not None:
            self.session.resources.callback(sockets.close)
        return sockets

    @property
    def stop_requested(self) -> bool:
        """Whether this rank is requested to end. Ranks agree on requests at the end of a step."""
        return self.session.stop()

    def subworld(self, group: dist.ProcessGroup) -> World:
        """Return the world of the ranks of `group`, which contains this rank."""
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        return World(rank, size, self.device, self.session, group, timeout=self.timeout)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics with the loggers of `samestep.init`; ranks other than 0 return at once."""
        for logger in self.session.loggers:
            logger.log(step, values)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over ranks in place, in the backend's order of summation."""
        self._begin("all-reduce")
        self.run_collective(lambda: dist.all_reduce(tensor, group=self.group), "an all-reduce")

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcast a contiguous tensor of any dtype from the rank `source`, in place."""
        self._begin("broadcast")
        if tensor.numel() > 0:
            # Bytes: the backend does not support every dtype.
            raw = tensor.flatten().view(torch.uint8)
            self.run_collective(
                lambda: dist.broadcast(raw, group=self.group, group_src=source), "a broadcast"
            )

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._begin("barrier")
        self.run_collective(lambda: dist.barrier(group=self.group), "a barrier")

    def _begin(self, collective: str) -> None:
        # The check compares all ranks, not those of a subworld.
        if self.group is None or self.is_private:
            self.session.collective_check.begin_collective(collective)

    def run_collective(self, collective: Callable[[], Result], name: str) -> Result:
        """Return the result of a collective, with `name` in the status of this rank.

        Raises:
            PeerLostError: the backend cannot reach another rank.
            RuntimeError: the collective failed for another reason, such as a lack of memory.
        """
        try:
            with self.session.status.waiting(name):
                return collective()
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
    session: Session,
    strategy: StrategyConfig,
    timeout: timedelta,
) -> World:
    """Create the process groups and the mesh of a strategy. Collective: every rank calls it.

    Plain replication needs no group but the default one.

    Raises:
        InputError: the strategy has no mesh for this number of ranks.
    """
    world = World(rank, size, device, session, strategy=strategy, timeout=timeout)
    shape = world.mesh_shape
    if not shape.splits_model:
        return world
    from torch.distributed.tensor import _redistribute, debug  # slow to import

    # torch takes meshes with equal ranks and names for equal: its caches of an earlier world in
    # this process would call groups that no longer exist, or other groups of these names.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    ranks = torch.arange(shape.size).view(shape.sizes)
    # Groups of our own: those that torch creates for a mesh have a timeout of 30 minutes.
    axes = [
        _create_groups(rank, ranks.movedim(axis, -1).reshape(-1, length), timeout)
        for axis, length in enumerate(shape.sizes)
    ]
    mesh = DeviceMesh.from_group(axes, device.type, ranks, mesh_dim_names=AXES)
    data_world = None
    if shape.data_size < size:
        axes_of_data = [AXES.index("replicate"), AXES.index("shard")]
        rows = ranks.movedim(axes_of_data, [-2, -1]).reshape(-1, shape.data_size)
        data_world = world.subworld(_create_groups(rank, rows, timeout))
    return replace(world, mesh=mesh, data_world=data_world)


def _create_groups(rank: int, rows: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Create one group per row of ranks, in the same order on all; return the group of `rank`."""
    if len(rows) == 1:
        # All ranks: their group exists, and a second one would have connections of its own.
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    groups = [(row, dist.new_group(row, timeout=timeout)) for row in rows.tolist()]
    own: dist.ProcessGroup = next(group for row, group in groups if rank in row)
    return own


# A script under the global view is written for one process: it must find no default group. torch
# creates groups only beside a default one, so the group of all ranks is created as the default
# group and hidden afterwards.


def hide_default_group() -> dist.ProcessGroup:
    """Hide torch's default group, and return it. Collectives with `group=` use it as before."""
    group = dist.group.WORLD
    assert group is not None
    _update_default_pg(None)
    return group


@contextmanager
def shown(group: dist.ProcessGroup) -> Iterator[None]:
    """Make a hidden group the default one inside the block, as `new_group` of torch needs."""
    before = dist.group.WORLD
    _update_default_pg(group)
    try:
        yield
    finally:
        _update_default_pg(before)


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy a hidden group, with the groups beside it unless the script has a default group.

    Without a hidden group, destroy the default one.
    """
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
        return
    if group is not None:
        _update_default_pg(group)
    dist.destroy_process_group()


def all_gather(value: Any, world: World) -> list[Any]:
    """Return the values of all ranks, by rank; see `samestep.all_gather`. Collective.

    Values are sent as JSON and bytes instead of pickle.
    """
    if isinstance(value, torch.Tensor):
        header = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)])
        elements = device_reads.copy(value.detach()).contiguous().reshape(-1)
        body = elements.view(torch.uint8).numpy().tobytes()
        data = _TENSOR.join([b"", header.encode(), body])
    else:
        data = _json_bytes(value)
    world._begin("all-gather")
    # The first message has the length, and the data if it fits. No copy of large data is made for
    # the length.
    first = len(data).to_bytes(_LENGTH_BYTES, "little")
    if len(data) <= _FEW_DATA_BYTES:
        first += data
    rows = _gather_bytes(first, _LENGTH_BYTES + _FEW_DATA_BYTES, world)
    lengths = [int.from_bytes(row[:_LENGTH_BYTES].numpy(), "little") for row in rows]
    if max(lengths) > _FEW_DATA_BYTES:
        rows = _gather_bytes(data, max(lengths), world)
    else:
        rows = [row[_LENGTH_BYTES:] for row in rows]
    received = (row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True))
    return [_value(data, world.device) for data in received]


def _gather_bytes(data: bytes, length: int, world: World) -> list[torch.Tensor]:
    own = torch.zeros(length, dtype=torch.uint8)  # on the CPU: no wait for a GPU
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world.size)]
    world.run_collective(lambda: dist.all_gather(rows, own, group=world.group), "an all-gather")
    return rows


def _value(data: bytes, device: torch.device) -> Any:
    if not data.startswith(_TENSOR):
        return json.loads(data)
    # Twice at most: the elements can contain this byte.
    _, header, elements = data.split(_TENSOR, 2)
    name, shape = json.loads(header)
    flat = torch.empty(0, dtype=getattr(torch, name))
    if elements:  # torch.frombuffer refuses empty data
        flat = torch.frombuffer(bytearray(elements), dtype=flat.dtype)
    return flat.reshape(shape).to(device)


def _json_bytes(value: Any) -> bytes:
    try:
        data = json.dumps(value).encode()
        # After `dumps`, which refuses containers that contain themselves.
        _require_string_keys(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"all_gather received a value that is not JSON: {error}",
            expected="a tensor, or numbers, strings, booleans, None, lists and string-keyed "
            "mappings",
            fix="send plain values, tensors one by one, and pairs instead of a mapping with "
            "numbers as keys",
            code="E_NOT_PICKLABLE",
        ) from error
    return data


def _require_string_keys(value: Any) -> None:
    """Reject mappings with other keys than strings: JSON would convert the key 1 to "1"."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}")
            _require_string_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_string_keys(item)
