"""One rank's part in a world: rendezvous, device, process group, determinism, teardown."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.config import DeviceKind, Reduction
from samestep.errors import InputError, RunError
from samestep.runtime.env import Environment, prepare_torch_environment, read_environment
from samestep.runtime.roll_call import RollCall
from samestep.runtime.stop import StopRequest
from samestep.runtime.world import World

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Seat:
    """What the launcher tells the process that is to be one rank.

    Attributes:
        rank: this process, from 0.
        size: number of ranks.
        port: where rank 0's store listens, on the loopback interface.
        listener: the bound socket behind `port`, in rank 0 only; nobody else can take the port in between.
        stop: the request to end that this process listens for.
    """

    rank: int
    size: int
    port: int
    listener: socket.socket | None
    stop: StopRequest


_seats: list[Seat] = []


def take_seat(seat: Seat) -> None:
    """Remember the seat that the launcher gave to this process, for the `start` that follows."""
    _seats.append(seat)


def seat() -> tuple[int, int]:
    """The rank and the number of ranks that the launcher gave to this process; 0 of 1 where none did."""
    return (_seats[-1].rank, _seats[-1].size) if _seats else (0, 1)


@contextmanager
def start(
    *, device: DeviceKind = "auto", reduction: Reduction = "exact", threads: int = 1, timeout: timedelta = _TIMEOUT
) -> Iterator[World]:
    """Join the other ranks; alone where nobody started others.

    Ranks come from `samestep.launch` or the `samestep` command, else from the variables that torchrun sets,
    else this process is the only one.

    Args:
        device: `auto` takes this rank's GPU where torch sees one, else the CPU.
        reduction: under `exact`, torch is asked for deterministic kernels.
        threads: intra-operation threads of this rank. More are faster, but another number changes bits.
        timeout: how long a collective waits for the other ranks.

    Yields:
        The world, whose process group ends with the block.

    Raises:
        InputError: `device` is not there, or the block is nested in another one.
    """
    if dist.is_initialized():
        raise InputError(
            "a process group exists already in this process",
            rule="one samestep.start() a process, and no init_process_group beside it",
            do="pass the world you have on to the code that needs one",
        )
    env = read_environment()
    taken = _seats[-1] if _seats else None
    on_one_machine = taken is not None or env.rendezvous is None
    prepare_torch_environment(loopback=on_one_machine)
    rank, size, local_rank = _place(taken, env)
    place = _device(device, local_rank)
    torch.set_num_threads(threads)
    _determinism(reduction)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    store = _store(taken, env, rank, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    stop = taken.stop if taken else StopRequest()
    roll_call = RollCall(store, rank=rank, size=size, timeout=timeout)
    world = World(rank=rank, size=size, device=place, stop_requested=stop, roll_call=roll_call)
    try:
        with roll_call.until_end():
            yield world
    except BaseException:
        # Other ranks may wait in a collective for this one, and tearing the group down could wait for them in turn.
        if size == 1:
            dist.destroy_process_group()
        raise
    # Ranks leave in step: one that destroys its group while another still talks can abort at exit.
    world.barrier()
    dist.destroy_process_group()


def _place(seat: Seat | None, env: Environment) -> tuple[int, int, int]:
    if seat is not None:
        return seat.rank, seat.size, seat.rank
    if env.rendezvous is not None:
        found = env.rendezvous
        return found.rank, found.world_size, found.local_rank
    return 0, 1, 0


def _device(kind: DeviceKind, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and gpus == 0):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise InputError(
            f"this rank is number {local_rank} on its machine but torch sees {gpus} GPUs",
            rule="one GPU a rank",
            do=f"use --processes {gpus}, or --device cpu" if gpus else "use --device cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _determinism(reduction: Reduction) -> None:
    exact = reduction == "exact"
    torch.use_deterministic_algorithms(exact)
    # Filling fresh memory only helps programs that read it uninitialised, and costs a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _store(seat: Seat | None, env: Environment, rank: int, size: int, timeout: timedelta) -> dist.Store:
    if seat is None and env.rendezvous is None:
        return dist.HashStore()
    if seat is None:
        assert env.rendezvous is not None
        found = env.rendezvous
        is_host = rank == 0 and not found.has_store
        return dist.TCPStore(found.address, found.port, size, is_host, timeout)
    if rank != 0:
        return dist.TCPStore("127.0.0.1", seat.port, size, False, timeout)
    if seat.listener is None or seat.listener.fileno() < 0:
        raise RunError(
            "samestep.start() was entered twice in one launched process",
            rule="one block a launch",
            do="put both parts into one block, or launch twice",
        )
    # A store that opens its own port listens on every interface; one that is given a socket does not.
    return dist.TCPStore("127.0.0.1", seat.port, size, True, timeout, master_listen_fd=seat.listener.detach())
