"""One rank's part in a world: rendezvous, device, process group, determinism, teardown."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from samestep.config import DeviceKind, Reduction, StrategyPart
from samestep.errors import InputError
from samestep.runtime.board import Pulse, own_pulse
from samestep.runtime.env import prepare_torch_environment, read_environment, read_rendezvous
from samestep.runtime.job import TIMEOUT, Job, hosted, join_job
from samestep.runtime.mesh import lay_out
from samestep.runtime.mutual_watch import MutualWatch
from samestep.runtime.own_devices import first_gpu
from samestep.runtime.rendezvous import Rendezvous
from samestep.runtime.roll_call import RollCall
from samestep.runtime.roll_in import job_prefix, roll_in
from samestep.runtime.stop import REQUESTS, StopRequest
from samestep.runtime.watchdog import HANG_AFTER, LATER_SECONDS
from samestep.runtime.world import World


@dataclass(frozen=True)
class Seat:
    """What the launcher tells the process that is to be one rank.

    Attributes:
        rank: this process, from 0.
        size: number of ranks.
        port: where rank 0's store listens, on the loopback interface.
        listener: the bound socket behind `port`, in rank 0 only; nobody else can take the port in between.
        stop: the request to end that this process listens for.
        pulse: where this rank shows its launcher what it does.
        timeout: how long a collective waits for the other ranks, in seconds, where `start` is not told.
    """

    rank: int
    size: int
    port: int
    listener: socket.socket | None
    stop: StopRequest
    pulse: Pulse
    timeout: float


_seats: list[Seat] = []
_worlds: list[str] = []  # those that this process has entered with others
_hosted: list[dist.Store] = []  # the store of a launch, in its rank 0
_rolled_in: list[dist.Store] = []
_left: list[dist.ProcessGroup | None] = []


def take_seat(seat: Seat) -> None:
    """Remember the seat that the launcher gave to this process, for the `start` that follows."""
    _seats.append(seat)


def seat() -> tuple[int, int]:
    """The rank and the number of ranks that the launcher gave to this process; 0 of 1 where none did."""
    return (_seats[-1].rank, _seats[-1].size) if _seats else (0, 1)


def seat_port() -> int:
    """The port on the loopback interface where the store of the launch listens."""
    return _seats[-1].port


@contextmanager
def start(
    *,
    device: DeviceKind = "auto",
    reduction: Reduction = "exact",
    threads: int = 1,
    timeout: timedelta | None = None,
    strategy: StrategyPart | None = None,
) -> Iterator[World]:
    """Join the other ranks; alone where nobody started others.

    Ranks come from `samestep.launch` or the `samestep` command, else from the variables that torchrun, Slurm's srun or
    MPI's mpirun sets (docs/launching.md), else this process is the only one.

    Args:
        device: `auto` takes this rank's GPU where torch sees one, else the CPU.
        reduction: under `exact`, torch is asked for deterministic kernels.
        threads: intra-operation threads of this rank. More are faster, but another number changes bits.
        timeout: how long ranks may get nowhere, and how long a collective waits for the others. None means 10 minutes,
            or what the launcher was told, and for collectives a little longer, so that who hangs is named first.
        strategy: how the model lives on the ranks; a copy on each where it is not given.

    Yields:
        The world, whose process group ends with the block.

    Raises:
        InputError: `device` is not there, the strategy has no layout here, or the block is nested in another one.
    """
    _require_no_group()
    taken = _seats[-1] if _seats else None
    found = read_rendezvous() if taken is None else None
    prepare_torch_environment(loopback=found is None or found.is_on_one_machine)
    rank, size, local_rank = _place(taken, found)
    place = _device(device, local_rank, found, _width(strategy))
    _determinism(reduction, threads)
    pulse = taken.pulse if taken else own_pulse()
    store, patience, watch = _join(taken, found, timeout, place, pulse)
    stop = taken.stop if taken else StopRequest()
    if taken:
        stop.listen()  # not before: a script that knows nothing of it must end by SIGTERM
    roll_call = RollCall(store, pulse, rank=rank, size=size, timeout=patience)
    world = World(
        rank=rank,
        size=size,
        device=place,
        stop_requested=stop,
        roll_call=roll_call,
        pulse=pulse,
        stop_signal=lambda: stop.number,
    )
    try:
        lay_out(world, strategy or StrategyPart(), patience)
        with roll_call.until_end(), _listening(stop) if found else nullcontext():
            yield world
    except BaseException:
        _abandon(world, watch)
        raise
    _leave(world, watch, is_launched=taken is not None)


def _join(
    taken: Seat | None, found: Rendezvous | None, timeout: timedelta | None, place: torch.device, pulse: Pulse
) -> tuple[dist.Store, timedelta, MutualWatch | None]:
    """Make the process group; this world's part of the store, how long collectives wait, and who watches the others."""
    rank, size, _ = _place(taken, found)
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    with pulse.during("samestep.start()"), pulse.waiting("the rendezvous"):
        job, store, hang_after = _meet(taken, found, timeout)
        patience = timedelta(seconds=hang_after + (LATER_SECONDS if job is not None else 0))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    watch = MutualWatch(job, store, pulse, hang_after) if job is not None and size > 1 else None
    return store, patience, watch


def _meet(
    taken: Seat | None, found: Rendezvous | None, timeout: timedelta | None
) -> tuple[Job | None, dist.Store, float]:
    """The job of another launcher, this world's part of the store, and how many seconds ranks may get nowhere."""
    job = join_job(found, timeout or TIMEOUT) if found else None
    store = _store(taken, job, timeout or TIMEOUT)
    if timeout is not None:
        return job, store, timeout.total_seconds()
    return job, store, taken.timeout if taken else job.hang_after if job else HANG_AFTER


def _leave(world: World, watch: MutualWatch | None, *, is_launched: bool) -> None:
    # Ranks leave in step: one that destroys its group while another still talks can abort at exit.
    world.barrier()
    if watch is not None:
        watch.close()
        world.barrier()  # a rank that still looks would find the store gone
    world.pulse.end()
    if is_launched:
        # When a model under DDP is dropped later, and the group with it, torch waits for threads of gloo that may wait
        # for Python's lock in turn. A rank ends soon.
        _left.append(dist.group.WORLD)
    dist.destroy_process_group()


def _abandon(world: World, watch: MutualWatch | None) -> None:
    if watch is not None:
        watch.let_it_end()
    # Other ranks may wait in a collective for this one, and tearing the group down could wait for them in turn.
    if world.size == 1:
        dist.destroy_process_group()


def _require_no_group() -> None:
    if dist.is_initialized():
        raise InputError(
            "a process group exists already in this process",
            rule="one samestep.start() a process, and no init_process_group beside it",
            do="pass the world you have on to the code that needs one",
        )


@contextmanager
def _listening(stop: StopRequest) -> Iterator[None]:
    """Hear requests to end while the block runs, Ctrl-C once too; outside of the main thread they are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *REQUESTS)}

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        signal.raise_signal(signal.SIGTERM)

    stop.listen()
    signal.signal(signal.SIGINT, on_interrupt)
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_workers() -> None:
    """End loaders' workers that still run: they ignore the SIGTERM by which Python would, as this process did."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch takes a worker that was killed for one that failed
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def _place(seat: Seat | None, found: Rendezvous | None) -> tuple[int, int, int]:
    if seat is not None:
        return seat.rank, seat.size, seat.rank
    return (found.rank, found.world_size, found.local_rank) if found is not None else (0, 1, 0)


def _width(strategy: StrategyPart | None) -> int:
    """How many devices each rank has of the machine's."""
    return (strategy.devices or 1) if strategy is not None and strategy.name == "placed" else 1


def _device(kind: DeviceKind, local_rank: int, found: Rendezvous | None, width: int) -> torch.device:
    """The first of this rank's devices."""
    gpus = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == width and found is not None and found.launcher != "torchrun":
        local_rank = 0  # srun --gpus-per-task=1 and its like show each rank its own device alone
    place = torch.device("cuda", first_gpu(local_rank, width, gpus))
    torch.cuda.set_device(place)
    return place


def _determinism(reduction: Reduction, threads: int) -> None:
    torch.set_num_threads(threads)
    exact = reduction == "exact"
    torch.use_deterministic_algorithms(exact)
    # Filling fresh memory only helps programs that read it uninitialised, and costs a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _store(seat: Seat | None, job: Job | None, timeout: timedelta) -> dist.Store:
    """The part of the job's store that this world has for itself."""
    if seat is not None:
        whole = _seat_store(seat, timeout)
    elif job is not None:
        whole = job.store
    else:
        return dist.HashStore()
    _worlds.append(f"world-{len(_worlds)}")  # all ranks enter them in one order
    return dist.PrefixStore(_worlds[-1], whole)


def _seat_store(seat: Seat, timeout: timedelta) -> dist.Store:
    if not _rolled_in:
        host_store(timeout)
        store = _hosted[0] if _hosted else _connect(seat, timeout)
        part = dist.PrefixStore(job_prefix(read_environment().token), store)
        hint = "look at the output of the ranks that are missing"
        _rolled_in.append(roll_in(part, rank=seat.rank, size=seat.size, restarts=0, timeout=timeout, hint=hint)[0])
    return _rolled_in[0]


def host_store(timeout: timedelta) -> None:
    """In rank 0 of a launch: open the store of the job, which then stays open as long as this process."""
    taken = _seats[-1]
    if taken.rank == 0 and not _hosted:
        assert taken.listener is not None
        _hosted.append(hosted(taken.listener, "127.0.0.1", taken.port, taken.size, timeout))


def _connect(seat: Seat, timeout: timedelta) -> dist.Store:
    return dist.TCPStore("127.0.0.1", seat.port, seat.size, False, timeout, wait_for_workers=False)
