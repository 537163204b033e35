"""Rendezvous: the ranks of a job find each other in its store, and agree on one report at the end.

A store may hold keys of other jobs and of earlier attempts. Rank 0 generates a new name for the
attempt. Every other rank posts a nonce of its own until rank 0 answers the nonce with that name;
the rank then confirms under the name. All keys have a prefix of the job's token and number of
ranks, so a job with another token or size is invisible.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from samestep.distributed.env import prepare_torch_environment, read_environment
from samestep.distributed.launcher_variables import RankPlace, is_loopback
from samestep.distributed.standard_streams import report_line
from samestep.distributed.status import ranks_text
from samestep.errors import EXIT_FAILED, InputError, RunError
from samestep.launcher.failure import Failure
from samestep.launcher.process_state import Job, WorkerSpec, process_state
from samestep.launcher.watchdog import HANG_AFTER

TIMEOUT = timedelta(seconds=HANG_AFTER)
_CONNECT_SECONDS = 5.0
_CONNECT_POLL_SECONDS = 0.1
_MIN_POLL_SECONDS = 0.0005
_MAX_POLL_SECONDS = 0.1
# Time that a rank which lost another waits for the report of the lost rank.
_SETTLE_SECONDS = 1.0
# Time that rank 0 gives the others to read its report, because the store may end with rank 0.
_READERS_SECONDS = 2.0
_REPORTERS = "failure/reporters"
_EXIT_CODE = "failure/exit-code"
_SEEN = "failure/seen"
# Time for a step and its checkpoint after the request to stop that follows the end of the launcher.
_STOP_SECONDS = 6.0
_LAUNCHER_POLL_SECONDS = 0.1
# Time for the report of the first rank of a machine, before other ranks request the stop.
_REPORT_SECONDS = 0.5


def join_job(
    rank_place: RankPlace, timeout: timedelta = TIMEOUT, hang_after: float = HANG_AFTER
) -> Job:
    """Wait for all ranks of the job. Later calls in the same process return the same job.

    Raises:
        InputError: the address is invalid, or the port in use.
        RunError: the store or a rank does not appear.
    """
    if process_state.job is None:
        rank = rank_place.rank
        size = rank_place.world_size
        address = rank_place.address
        port = rank_place.port
        has_store = rank_place.has_store
        # Before the wait for other ranks, in which the launcher can end.
        watch_launcher(rank_place)
        prepare_torch_environment(loopback=rank_place.is_on_one_machine)
        if rank == 0 and not has_store:
            tcp = host_tcp_store(listen(address, port), (address, port), size, timeout)
        else:
            tcp = _connect(rank_place, timeout)
        store = dist.PrefixStore(read_environment().job_prefix, tcp)
        restarts = rank_place.restarts
        if has_store and rank == 0:
            # The store of torchrun's agent outlives an attempt. The agent's count of restarts is
            # not sufficient: on several machines each agent counts its own.
            restarts = max(restarts, store.add("starts", 1) - 1)
        attempt, restarts = wait_for_ranks(
            store, rank=rank, size=size, restarts=restarts, timeout=timeout, hint=_hint(rank_place)
        )
        job = Job(rank, size, attempt, restarts, (address, port), has_store, hang_after)
        process_state.job = job
    return process_state.job


def join_launch(worker: WorkerSpec, timeout: timedelta) -> dist.Store:
    """Return the part of the launch's store that no script uses."""
    if process_state.launch_store is None:
        host_store(worker, timeout)
        tcp = process_state.hosted_store
        if tcp is None:
            address = worker.store_address
            tcp = dist.TCPStore(*address, worker.size, False, timeout, wait_for_workers=False)
        process_state.launch_store = dist.PrefixStore("samestep", tcp)
    return process_state.launch_store


def host_store(worker: WorkerSpec, timeout: timedelta) -> None:
    """In rank 0 of a launch: open the store of the launch, which stays open until the end."""
    if worker.rank == 0 and process_state.hosted_store is None:
        assert worker.listener is not None
        process_state.hosted_store = host_tcp_store(
            worker.listener, worker.store_address, worker.size, timeout
        )


def host_tcp_store(
    listener: socket.socket, address: tuple[str, int], size: int, timeout: timedelta
) -> dist.Store:
    """Host a store behind a listening socket.

    A store that opens its own port listens on every interface.
    """
    descriptor = listener.detach()
    # Without torch's wait for workers: `wait_for_ranks` names the missing ones.
    return dist.TCPStore(
        *address, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def _connect(rank_place: RankPlace, timeout: timedelta) -> dist.Store:
    address = rank_place.address
    port = rank_place.port
    size = rank_place.world_size
    _resolve(address, port)
    # Own attempts first: torch's attempts end with pages of C++ frames.
    deadline = time.monotonic() + timeout.total_seconds()
    while not accepts_connections(address, port):
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {rank_place.rank} of {size} cannot connect to {address}:{port} within "
                f"{timeout.total_seconds():g} s",
                expected="rank 0, or the launcher, listens at this address",
                fix=_hint(rank_place),
                code="E_RENDEZVOUS",
            )
        time.sleep(_CONNECT_POLL_SECONDS)
    return dist.TCPStore(address, port, size, False, timeout, wait_for_workers=False)


def _hint(rank_place: RankPlace) -> str:
    if is_loopback(rank_place.address) and not rank_place.is_on_one_machine:
        return (
            f"MASTER_ADDR is {rank_place.address}, which no other machine reaches: set it to the "
            "address of rank 0"
        )
    return "read the output of the missing ranks, and check for a firewall between machines"


def accepts_connections(address: str, port: int) -> bool:
    """Whether a process listens at an address."""
    with suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_SECONDS):
        return True
    return False


def _resolve(address: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return address families and socket addresses of a host."""
    try:
        results = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise InputError(
            f"the host {address!r} cannot be resolved: {error.strerror}",
            expected="the host of rank 0, from MASTER_ADDR or the list of hosts of the Slurm step",
            fix="set MASTER_ADDR to an address that all ranks can reach",
            code="E_RENDEZVOUS",
        ) from error
    return [(family, socket_address) for family, _, _, _, socket_address in results]


def listen(address: str, port: int) -> socket.socket:
    """Listen on an address of this machine alone; for another one, as of a proxy, on all."""
    attempts = _resolve(address, port)
    everywhere = (attempts[0][0], ("", port))
    # /etc/hosts may map the machine's own name to a loopback address; the address that others use
    # is unknown then.
    if not is_loopback(address) and any(is_loopback(str(target[0])) for _, target in attempts):
        attempts = []
    for family, target in [*attempts, everywhere]:
        try:
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            return socket.create_server(target, family=family, backlog=1024, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"port {port} at {address} is used by another process",
                    expected="a free port for rank 0: MASTER_PORT, or in Slurm one derived from "
                    "job and step",
                    fix="set MASTER_PORT to a free port, the same for all ranks",
                    code="E_RENDEZVOUS",
                ) from error
            if error.errno != errno.EADDRNOTAVAIL or not target[0]:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def wait_for_ranks(
    store: dist.Store, *, rank: int, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    """Wait until all ranks have joined, each with its launcher's number of restarts.

    Returns:
        The part of the store that belongs to this attempt alone, and the largest number of restarts
        of any rank.

    Raises:
        RunError: a rank is missing after `timeout`, or two processes have the same rank.
    """
    store = dist.PrefixStore(str(size), store)
    if rank == 0:
        return _admit_ranks(store, size, restarts, timeout, hint)
    nonce = uuid4().hex
    store.set(f"hello/{rank}", f"{nonce} {restarts}")

    def wait(store: dist.Store, key: str) -> str:
        problem = f"rank {rank} of {size} received no answer from rank 0"
        _poll(lambda: store.check([key]), lambda: problem, timeout, hint)
        return store.get(key).decode()

    attempt = dist.PrefixStore(wait(store, f"welcome/{nonce}"), store)
    if attempt.add(f"here/{rank}", 1) > 1:
        raise RunError(
            f"two processes are rank {rank} of {size}",
            expected="every process of a job has its own rank",
            fix=hint,
            code="E_RENDEZVOUS",
        )
    return attempt, int(wait(attempt, "begin"))


def _admit_ranks(
    store: dist.Store, size: int, restarts: int, timeout: timedelta, hint: str
) -> tuple[dist.Store, int]:
    name = uuid4().hex
    attempt = dist.PrefixStore(name, store)
    missing = set(range(1, size))
    nonces: dict[int, str] = {}
    counts = {0: restarts}

    def all_joined() -> bool:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]):
                nonce, count = store.get(f"hello/{rank}").decode().split()
                if nonces.get(rank) != nonce:
                    nonces[rank] = nonce
                    counts[rank] = int(count)
                    store.set(f"welcome/{nonce}", name)
            if attempt.check([f"here/{rank}"]):
                missing.remove(rank)
        return not missing

    def problem() -> str:
        return f"{ranks_text(sorted(missing))} of {size} did not join"

    _poll(all_joined, problem, timeout, hint)
    attempt.set("begin", str(max(counts.values())))
    return attempt, max(counts.values())


def _poll(
    is_done: Callable[[], bool], problem: Callable[[], str], timeout: timedelta, hint: str
) -> None:
    began = time.monotonic()
    limit = timeout.total_seconds()
    try:
        while not is_done():
            waited = time.monotonic() - began
            if waited > limit:
                raise RunError(
                    f"{problem()} within {limit:g} s",
                    expected="every rank connects to the store of rank 0, with the same "
                    "SAMESTEP_TOKEN and number of ranks",
                    fix=hint,
                    code="E_RENDEZVOUS",
                )
            time.sleep(_poll_seconds(waited))
    except dist.DistError as error:
        raise RunError(
            f"the store of the job is gone: {str(error).splitlines()[0]}",
            expected="rank 0, or the launcher, hosts the store until the job ends",
            fix=hint,
            code="E_LAUNCHER_GONE",
        ) from error


def _poll_seconds(waited: float) -> float:
    """Return the time until the next read after a wait of some seconds."""
    # Short at first: ranks that start together arrive within milliseconds.
    return min(max(waited / 8, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Wait until all keys are set, at most for some seconds."""
    # No blocking read: Python would handle no signal meanwhile, and torch prints warnings when one
    # ends without an answer.
    began = time.monotonic()
    while keys and not store.check(keys) and (waited := time.monotonic() - began) < seconds:
        time.sleep(_poll_seconds(waited))


def failure_reported(store: dist.Store) -> bool:
    """Whether a rank has reported a failure, or the store is gone with a failed rank."""
    try:
        return bool(store.check([_EXIT_CODE]))
    except dist.DistError:
        return True


def report_failure(
    job: Job, failure: Failure, show: Callable[[], None] | None = None
) -> tuple[bool, int]:
    """Agree on one report among the ranks of a job.

    A rank that only lost another rank reports if no other rank does. If the store is gone, rank 0
    or the launcher is gone too: either has reported, or was killed and its parent reports.

    Args:
        job: the job of this rank.
        failure: failure of this rank.
        show: prints the report, if this rank must, before other ranks end: a launcher then kills
            this one.

    Returns:
        Whether this rank must print the report, and the exit code of the reported failure.
    """
    store = job.store
    is_first = False
    code = failure.exit_code
    # torch prints pages if its own connection fails.
    if job.rank != 0 and not accepts_connections(*job.address):
        return is_first, code
    with suppress(dist.DistError):
        if failure.is_consequence:
            wait_for_keys(store, [_EXIT_CODE], _SETTLE_SECONDS)
        is_first = store.add(_REPORTERS, 1) == 1  # atomic
        if is_first:
            if show is not None:
                show()
            store.set(_EXIT_CODE, str(code))
        else:
            # A blocking read: the rank that was first sets the code.
            code = int(store.get(_EXIT_CODE))
        # From here on rank 0 may be gone, and the store with it.
        store.set(f"{_SEEN}/{job.rank}", "")
        if job.rank == 0:
            others = [f"{_SEEN}/{other}" for other in range(1, job.size)]
            wait_for_keys(store, others, _READERS_SECONDS)
    return is_first, code


def watch_launcher(rank_place: RankPlace) -> None:
    """End this process with its parent, by which a launcher started the ranks of this machine.

    The process receives SIGTERM, which requests a stop with a checkpoint inside of
    `samestep.init()`, and ends some seconds later in any case. Ranks that were started by hand are
    not watched: they may outlive a shell.
    """
    parent = os.getppid()
    if rank_place.ends_with_parent and parent > 1:
        name = "samestep-external-launcher-watch"
        threading.Thread(target=_watch, args=(parent, rank_place), name=name, daemon=True).start()


def _watch(launcher: int, rank_place: RankPlace) -> None:
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_POLL_SECONDS)
    if rank_place.local_rank == 0:
        name = rank_place.launcher
        report_line(
            f"error: the process {launcher} of {name} has ended, and its ranks end with it "
            "[E_LAUNCHER_GONE]\n"
            f"  expected: {name} runs until its ranks have ended\n"
            "  fix:      start the same command again: it resumes from the newest checkpoint"
        )
    else:
        # A stop that another rank requests first could end the first one before its report.
        time.sleep(_REPORT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)
    os._exit(EXIT_FAILED)
