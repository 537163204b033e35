"""What is asked inside of ranks: of torch, of its devices, and of ranks that meet."""

from __future__ import annotations

import os
import time

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from samestep.errors import RunError
from samestep.runtime.session import start
from samestep.runtime.world import World
from samestep.tools.doctor.probe_facts import Met, TorchView

_ROUNDS = 6
# A worker that cannot hand over what it made tells nobody but its own terminal.
_WORKER_SECONDS = 20
_CPU_BYTES, _GPU_BYTES = 16 << 20, 256 << 20


def torch_view() -> TorchView:
    """What torch sees; run in a rank, for it touches devices."""
    _be_quiet()
    if torch.version.cuda is None:
        return TorchView()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no driver, one that is too old, a card that does not answer
        return TorchView(nccl, failed=str(error).splitlines()[0])
    numbers = range(torch.cuda.device_count())
    apart = [(i, j) for i in numbers for j in numbers if i != j and not torch.cuda.can_device_access_peer(i, j)]
    names = tuple(torch.cuda.get_device_name(number) for number in numbers)
    built = torch.cuda.get_arch_list()
    too_new = tuple(
        name for number, name in enumerate(names) if not has_kernels(torch.cuda.get_device_capability(number), built)
    )
    return TorchView(nccl, names, tuple(apart), too_new)


def has_kernels(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether a GPU of this compute capability runs what torch was built for.

    Binaries (`sm_`) run on later minor versions of the same major one, PTX (`compute_`) on everything later.

    Args:
        built: such as `sm_80`, `sm_90a` and `compute_90`.
    """
    for entry in built:
        kind, _, digits = entry.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdecimal():
            continue
        its_major, its_minor = int(digits[:-1]), int(digits[-1])
        is_later = (its_major, its_minor) <= capability
        if is_later and (kind == "compute" or its_major == capability[0]):
            return True
    return False


def _be_quiet() -> None:
    """Keep what C++ code and workers say besides from the terminal: what went wrong is told as the finding."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class _Shards(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self._size,), index, dtype=torch.uint8)


def meet(device: str, shard_bytes: int) -> Met:
    """Meet the other ranks, sum with them, take shards from a worker; run in every rank."""
    _be_quiet()
    with start(device="cuda" if device == "cuda" else "cpu") as world:
        own = torch.full((1024,), world.rank + 1.0, device=world.device)
        world.all_reduce(own)
        expected = world.size * (world.size + 1) / 2
        wrong = None if bool((own == expected).all()) else float(own[own != expected][0])
        sent = _GPU_BYTES if world.device.type == "cuda" else _CPU_BYTES
        seconds = _fastest(world, sent)
        loader = DataLoader(
            _Shards(shard_bytes),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
            timeout=_WORKER_SECONDS,
        )
        for index, shard in enumerate(loader):
            if not bool((shard == index).all()):
                raise RunError(f"a worker made a shard of {index} and handed over {shard.unique().tolist()}")
        resident = psutil.Process().memory_info().rss
        return Met(world.size, world.device.type, wrong, seconds, sent, resident)


def _fastest(world: World, sent: int) -> float:
    tensor = torch.zeros(sent // 4, device=world.device)
    times = []
    for _ in range(_ROUNDS):
        world.barrier()
        _finish(world)
        began = time.perf_counter()
        world.all_reduce(tensor)
        _finish(world)
        times.append(time.perf_counter() - began)
    return min(times)


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
