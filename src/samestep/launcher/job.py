"""State of a rank's process, and the job of another launcher: store, rendezvous, reports of failures."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from samestep.distributed.addresses import accepts_connections, is_loopback, listen, resolve
from samestep.distributed.env import prepare_torch_environment, read_environment
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.rendezvous import wait_for_keys, wait_for_ranks
from samestep.errors import RunError
from samestep.launcher.failure import Failure
from samestep.launcher.orphans import watch_launcher
from samestep.launcher.source_files import SourceFiles
from samestep.launcher.watchdog import HANG_AFTER

if TYPE_CHECKING:
    from samestep.distributed.world import World
    from samestep.launcher.worker_spec import WorkerSpec

TIMEOUT = timedelta(seconds=HANG_AFTER)
_CONNECT_POLL_SECONDS = 0.1
# Time that a rank which lost another waits for the report of the lost rank.
_SETTLE_SECONDS = 1.0
# Time that rank 0 gives the others to read its report, because the store may end with rank 0.
_READERS_SECONDS = 2.0
_REPORTERS = "failure/reporters"
_EXIT_CODE = "failure/exit-code"
_SEEN = "failure/seen"


@dataclass(frozen=True)
class Job:
    """One attempt of a job that another launcher started."""

    rank: int
    size: int
    store: dist.Store  # of this attempt alone
    restarts: int  # restarts of the job; equal on every rank
    address: tuple[str, int]  # host and port of the store
    launcher_has_store: bool  # otherwise rank 0 hosts the store
    hang_after: float  # seconds without progress that count as a hang


class RanksWatch(Protocol):
    """Watchdog of ranks that another launcher started (`samestep.launcher.peer_watchdog.PeerWatchdog`)."""

    def close(self) -> None:
        """End the watch."""
        ...

    def join_if_ending(self) -> None:
        """Wait for a report that ends this process, if there is one."""
        ...


class Membership(NamedTuple):
    """Place of this rank among the ranks of a world, and the means to reach them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store  # of this world alone
    limit: timedelta  # of collectives
    rendezvous: Rendezvous | None = None  # of another launcher
    watchdog: RanksWatch | None = None
    group: dist.ProcessGroup | None = None  # None for the default group
    is_adopted: bool = False  # another library created the default group, and destroys it


@dataclass
class ProcessState:
    """State of one rank's process that consecutive worlds share."""

    worker: WorkerSpec | None = None  # from Samestep's launcher; None in any other process
    hosted_store: dist.Store | None = None  # the store of the launch, in the launch's rank 0
    launch_store: dist.Store | None = (
        None  # the launch's part of that store, in every rank of the launch
    )
    job: Job | None = None  # the job of another launcher, once joined
    session: ExitStack = field(default_factory=ExitStack)  # ends the world of `samestep.init()`
    world: World | None = None  # of `samestep.init()`, until its end
    # Of this world; their types belong to a higher level.
    options: Any = None  # `samestep.session.SessionOptions`
    view: Any = None  # `samestep.view.view.View`
    rendezvous: Rendezvous | None = (
        None  # of another launcher, whose variables a private world hides
    )
    worlds: int = 0  # number of worlds that this process has entered with other ranks
    # Process groups of finished worlds. They are never released in a launched rank: when a model
    # under DDP is released later, and its group with it, torch waits for gloo threads that may wait
    # for the GIL in turn.
    finished_groups: list[dist.ProcessGroup | None] = field(default_factory=list)
    source_files: SourceFiles = field(
        default_factory=SourceFiles
    )  # the user's modules of this process
    on_world: list[Callable[[World], None]] = field(
        default_factory=list
    )  # called with each world that this process enters
    # Called with each module and the options that a script gives to `samestep.parallel`, for
    # `samestep verify`.
    observe_module: Callable[[torch.nn.Module, dict[str, Any]], None] | None = None
    is_experiment: bool = False  # `samestep verify` and `profile`: scripts write no run directory
    is_script: bool = False  # the launched function is a script, which can be started again
    # Absolute path of the folder for all checkpoints of a script in an experiment; None outside.
    checkpoint_root: Path | None = None


# The only instance: a process has one place in one job.
process_state = ProcessState()


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks from Samestep's launcher; 0 and 1 in any other process."""
    worker = process_state.worker
    if worker is not None:
        return (worker.rank, worker.size)
    return (0, 1)


def join_job(
    rendezvous: Rendezvous, timeout: timedelta = TIMEOUT, hang_after: float = HANG_AFTER
) -> Job:
    """Wait for all ranks of the job. Later calls in the same process return the same job.

    An invalid address or a port in use raises `InputError`; a store or a rank that does not appear,
    `RunError`.
    """
    if process_state.job is None:
        rank = rendezvous.rank
        size = rendezvous.world_size
        has_store = rendezvous.has_store
        watch_launcher(rendezvous)
        prepare_torch_environment(loopback=rendezvous.is_on_one_machine)
        address = (rendezvous.address, rendezvous.port)
        tcp = _job_store(rendezvous, timeout)
        store = dist.PrefixStore(read_environment().job_prefix, tcp)
        # The store of torchrun's agent outlives an attempt. The agent's count of restarts is not
        # sufficient: on several machines each agent counts its own.
        earlier = store.add("starts", 1) - 1 if has_store and rank == 0 else 0
        restarts = max(rendezvous.restarts, earlier)
        hint = _hint(rendezvous)
        attempt, restarts = wait_for_ranks(
            store, rank=rank, size=size, restarts=restarts, timeout=timeout, hint=hint
        )
        process_state.job = Job(rank, size, attempt, restarts, address, has_store, hang_after)
    return process_state.job


def _job_store(rendezvous: Rendezvous, timeout: timedelta) -> dist.Store:
    """Host or open the store of the job."""
    address = rendezvous.address
    port = rendezvous.port
    if rendezvous.rank == 0 and not rendezvous.has_store:
        return _tcp_store(listen(address, port), address, port, rendezvous.world_size, timeout)
    return _connect(rendezvous, timeout)


def _tcp_store(
    listener: socket.socket, address: str, port: int, size: int, timeout: timedelta
) -> dist.Store:
    """Host a store behind a listening socket. A store that opens its own port listens on every interface."""
    return dist.TCPStore(
        address,
        port,
        size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(rendezvous: Rendezvous, timeout: timedelta) -> dist.Store:
    address = rendezvous.address
    port = rendezvous.port
    resolve(address, port)
    # Own attempts first: torch's attempts end with pages of C++ frames.
    deadline = time.monotonic() + timeout.total_seconds()
    while not accepts_connections(address, port):
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {rendezvous.rank} of {rendezvous.world_size} cannot connect to {address}:{port} within "
                f"{timeout.total_seconds():g} s",
                expected="rank 0, or the launcher, listens at this address",
                fix=_hint(rendezvous),
                code="E_RENDEZVOUS",
            )
        time.sleep(_CONNECT_POLL_SECONDS)
    return dist.TCPStore(
        address, port, rendezvous.world_size, False, timeout, wait_for_workers=False
    )


def _hint(rendezvous: Rendezvous) -> str:
    if is_loopback(rendezvous.address) and not rendezvous.is_on_one_machine:
        return f"MASTER_ADDR is {rendezvous.address}, which no other machine reaches: set it to the address of rank 0"
    return "read the output of the missing ranks, and check for a firewall between machines"


def host_store(worker: WorkerSpec, timeout: timedelta) -> None:
    """In rank 0 of a launch: open the store of the launch. The store stays open until the process ends."""
    if worker.rank == 0 and process_state.hosted_store is None:
        assert worker.listener is not None
        process_state.hosted_store = _tcp_store(
            worker.listener, *worker.store_address, worker.size, timeout
        )


def failure_reported(store: dist.Store) -> bool:
    """Whether a rank has reported a failure, or the store is gone with a failed rank."""
    try:
        return bool(store.check([_EXIT_CODE]))
    except dist.DistError:
        return True


def report_failure(
    job: Job, failure: Failure, show: Callable[[], None] | None = None
) -> tuple[bool, int]:
    """Agree on one report; return whether this rank must print it, and the exit code of the reported failure.

    A rank that only lost another rank reports if no other rank does. If the store is gone, rank 0
    or the launcher is
    gone too: either has reported, or was killed and its parent reports.

    Args:
        job: the job of this rank.
        failure: failure of this rank.
        show: prints the report, if this rank must, before other ranks end: a launcher then kills
            this one.
    """
    store = job.store
    is_first = False
    code = failure.exit_code
    if job.rank != 0 and not accepts_connections(
        *job.address
    ):  # torch prints pages if its own connection fails
        return is_first, code
    with suppress(dist.DistError):
        if failure.is_consequence:
            wait_for_keys(store, [_EXIT_CODE], _SETTLE_SECONDS)
        is_first = store.add(_REPORTERS, 1) == 1
        if is_first:
            if show is not None:
                show()
            store.set(_EXIT_CODE, str(code))
        else:
            code = int(store.get(_EXIT_CODE))
        # From here on rank 0 may be gone, and the store with it.
        store.set(f"{_SEEN}/{job.rank}", "")
        if job.rank == 0:
            wait_for_keys(
                store, [f"{_SEEN}/{other}" for other in range(1, job.size)], _READERS_SECONDS
            )
    return is_first, code
