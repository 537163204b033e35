"""`samestep doctor`: checks of a machine before training, and a self-test of connected ranks."""

from __future__ import annotations

import csv
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Literal

import psutil

from samestep.checkpoint.durable_files import unsupported_features
from samestep.config import DeviceKind
from samestep.distributed.devices import ACCELERATOR, accelerator_module
from samestep.distributed.env import SHARE_GPU, relevant_variables
from samestep.distributed.launcher_variables import find_rank_place
from samestep.distributed.resources import usable_processors
from samestep.distributed.standard_streams import redirect_to_null
from samestep.errors import InputError, RunError, SamestepError
from samestep.launcher.launch import LaunchConfig, StoppedError
from samestep.number_text import format_bytes, plural
from samestep.tools.launch import run_on_ranks

_PACKAGES = ("samestep", "torch", "numpy", "torchvision", "safetensors", "transformers", "timm")
_ON = "(?i)1|true|yes|on"
_DEBUG = "much slower; for debugging"
_SLOW_LINKS = "slower transfers between GPUs"
_RESULTS = "results change, whatever the recipe says"
_SHARED_PROCESSORS = "ranks may share the processors of their threads"
# Variables that change results or speed: values, as a regular expression, and effect.
_EFFECTS = {
    "CUDA_LAUNCH_BLOCKING": (_ON, _DEBUG),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, _DEBUG),
    "TORCH_DISTRIBUTED_DEBUG": ("(?i)detail", _DEBUG),
    "NCCL_P2P_DISABLE": (_ON, _SLOW_LINKS),
    "NCCL_SHM_DISABLE": (_ON, _SLOW_LINKS),
    "NCCL_IB_DISABLE": (_ON, "sockets instead of InfiniBand"),
    "NVIDIA_TF32_OVERRIDE": (".+", _RESULTS),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (_ON, _RESULTS),
    "CUBLAS_WORKSPACE_CONFIG": ("(?!:4096:8$|:16:8$).*", "cuBLAS is not deterministic"),
    SHARE_GPU: (
        "nccl",
        "ranks that share a GPU send messages through sockets of NCCL: times of messages mean "
        "nothing",
    ),
    "OMP_PROC_BIND": ("(?i)true|close|master|primary|spread", _SHARED_PROCESSORS),
    "GOMP_CPU_AFFINITY": (".+", _SHARED_PROCESSORS),
}
_SHM = Path("/dev/shm")
_CONTAINER_SHM_BYTES = 64 << 20  # default of docker run
_MIN_OPEN_FILES = 1024  # common default; user code opens files too
# Three checkpoints (last two, best) of 30 million parameters with Adam in float32.
_MIN_FREE_BYTES = 1 << 30
_QUERY = "name,driver_version,memory.total,memory.used"
_NVIDIA_SMI_SECONDS = 20.0
# A desktop session uses up to this much of a GPU that also drives a display.
_DESKTOP_BYTES = 1 << 30
_HANG_AFTER_SECONDS = 40.0
_MAX_RANKS = 8

# By severity. `info`: no judgement. `warn`: a run works, but slowly or differently than expected.
# `fail`: a run fails, hangs or loses data.
Verdict = Literal["info", "pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # subject of the check
    verdict: Verdict
    value: str
    expected: str | None = None  # rule for a warning or a failure
    fix: str | None = None  # action for a warning or a failure


def judged(name: str, verdict: Verdict, value: str, expected: str, fix: str) -> Finding:
    """Return a finding, with `expected` and `fix` only for a warning or a failure."""
    if verdict in ("warn", "fail"):
        return Finding(name, verdict, value, expected, fix)
    return Finding(name, verdict, value)


def _verdict(passes: bool, otherwise: Verdict) -> Verdict:
    return "pass" if passes else otherwise


@dataclass(frozen=True)
class Plan:
    """Planned processes on this machine, and the needs of a small model."""

    processes: int  # ranks on this machine
    workers: int  # loader workers per rank; training and evaluation have as many each

    @property
    def memory(self) -> int:
        """Bytes of ranks (512 MiB: torch, a small model, an optimizer) and workers (256 MiB)."""
        return self.processes * (512 + 2 * self.workers * 256) << 20

    @property
    def shared_memory(self) -> int:
        """Bytes of three microbatches per worker, each of 32 float32 images of 224 x 224 pixels."""
        return self.processes * self.workers * 3 * 20 << 20

    @property
    def open_files(self) -> int:
        """Open files per rank; measured with two ranks: 33, and 67 with two workers each."""
        return 32 + 4 * self.processes + 2 * 10 * self.workers

    def __str__(self) -> str:
        return f"{plural(self.processes, 'rank')} with {plural(self.workers, 'worker')} each"


def check_machine(
    plan: Plan, nvidia: Nvidia, runs: Path, *, quick: bool, preload: Sequence[str]
) -> Iterator[Finding]:
    """Run all checks; `quick` skips the self-test, so that torch is not imported."""
    # The self-test runs first: the check of GPUs compares the driver with what torch sees.
    variables = relevant_variables()
    devices = None
    self_test = Finding("self-test", "info", "skipped")
    if not quick:
        devices, self_test = run_self_test(preload)
    yield from _check_packages()
    yield from check_variables(variables, usable_processors())
    yield from check_gpus(nvidia, devices)
    yield from _check_resources(plan)
    yield check_launcher(variables)
    yield from _check_folder(runs)
    yield self_test


# --- software -----------------------------------------------------------------------------------


def _check_packages() -> Iterator[Finding]:
    """List Python and the packages that runs use; `pip check` compares their requirements."""
    yield Finding("Python", "pass", platform.python_version())
    versions = []
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    yield Finding("packages", "pass", ", ".join(versions))


def check_variables(variables: Mapping[str, str], processors: int) -> Iterator[Finding]:
    """Check for variables that change results or speed, and for more threads than processors."""
    is_usual = True
    for name, (pattern, effect) in _EFFECTS.items():
        value = variables.get(name)
        if value is not None and re.fullmatch(pattern, value.strip()):
            is_usual = False
            text = f"{value}: {effect}"
            yield Finding(name, "warn", text, "unset, unless intended", f"unset {name}")
    name = "OMP_NUM_THREADS"
    number = variables.get(name, "1").split(",")[0].strip()  # one number per nesting level
    if not number.isdecimal() or not 1 <= int(number) <= processors:
        is_usual = False
        rule = f"a number between 1 and {processors}, since every rank starts as many"
        expected = f"{rule}; torch uses step.threads"
        yield Finding(name, "warn", variables[name], expected, f"export {name}=1, or unset {name}")
    if is_usual:
        yield Finding("environment variables", "pass", "none changes results or speed")


# --- GPUs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine; memory in bytes."""

    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True)
class Nvidia:
    """State of the NVIDIA driver."""

    driver: str | None = None  # version; None without a driver
    gpus: tuple[Gpu, ...] = ()
    error: str | None = None  # reason why nvidia-smi failed


@dataclass(frozen=True)
class TorchDevices:
    """GPUs as torch sees them."""

    gpus: tuple[str, ...] = ()  # names in torch's order
    unlinked: tuple[tuple[int, int], ...] = ()  # pairs without direct access to the other's memory
    error: str | None = None  # reason why torch cannot compute on a GPU


def read_nvidia() -> Nvidia:
    """Query nvidia-smi, without torch and without initializing a device."""
    if shutil.which("nvidia-smi") is None:
        return Nvidia()
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvidia(error=str(error))
    if done.returncode != 0:
        return Nvidia(error=(done.stdout + done.stderr).strip() or f"exit code {done.returncode}")
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(text: str) -> Nvidia:
    """Return the driver and the GPUs from the output of nvidia-smi, one line per GPU."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 4]
    gpus = []
    for name, _, *memory in rows:
        # Without support for the query, the value is `[N/A]`.
        total, used = (int(mib) << 20 if mib.isdecimal() else 0 for mib in memory)
        gpus.append(Gpu(name, total, used))
    drivers = [driver for _, driver, *_ in rows]
    return Nvidia(next(iter(drivers), None), tuple(gpus))


def check_gpus(nvidia: Nvidia, devices: TorchDevices | None) -> Iterator[Finding]:
    """Check that torch computes on the GPUs, that their memory is free, and their links."""
    if nvidia.error is not None:
        fix = "after a driver update, restart the machine; start a container with --gpus all"
        yield Finding("nvidia-smi", "fail", nvidia.error, "the driver responds", fix)
    if devices is None:  # without a self-test
        names = ", ".join(gpu.name for gpu in nvidia.gpus) or "none"
        yield Finding("GPUs", "info", f"{names}, reported by the driver")
    else:
        names = devices.error or ", ".join(devices.gpus) or "none"
        yield judged(
            "GPUs",
            _verdict(len(devices.gpus) >= len(nvidia.gpus), "fail"),
            f"{names}; driver {nvidia.driver or 'none'} reports {len(nvidia.gpus)}",
            "torch computes on each GPU",
            "unset CUDA_VISIBLE_DEVICES, unless intended; nvidia-smi -q reports a lost GPU; for "
            "another build, pip install --force-reinstall torch torchvision from the default index",
        )
    for index, gpu in enumerate(nvidia.gpus):
        yield judged(
            f"memory of GPU {index}",
            _verdict(gpu.memory_used <= _DESKTOP_BYTES, "warn"),
            f"{format_bytes(gpu.memory_used)} of {format_bytes(gpu.memory_total)} in use",
            "GPU memory is free before a run",
            "nvidia-smi lists the processes; end those that are left over from another run",
        )
    if devices is not None and len(devices.gpus) > 1:
        value = "each GPU accesses the memory of every other one"
        if devices.unlinked:
            pairs = ", ".join(f"{first} and {second}" for first, second in devices.unlinked)
            value = f"no direct access between GPUs {pairs}"
        yield judged(
            "GPU links",
            _verdict(not devices.unlinked, "warn"),
            value,
            "GPUs copy directly to each other; otherwise NCCL copies through host memory, which is "
            "slower",
            "nvidia-smi topo -m shows the links; select linked GPUs with --devices",
        )


# --- machine ------------------------------------------------------------------------------------


def _check_resources(plan: Plan) -> Iterator[Finding]:
    """Check processors, memory, shared memory and open files for the plan."""
    processors = usable_processors()
    yield judged(
        "processors",
        _verdict(plan.processes <= processors, "warn"),
        f"{processors} of {os.cpu_count()} for {plan}",
        "one processor per rank; results are equal, but the run is slower",
        f"--processes {processors}, or a higher limit (docker run --cpus, resources.limits.cpu of "
        "a pod)",
    )
    available = psutil.virtual_memory().available
    yield judged(
        "memory",
        _compare(available, plan.memory, plan.memory / 0.8),
        f"{format_bytes(available)} available, {format_bytes(plan.memory)} for {plan}",
        "ranks and workers fit in memory; otherwise the kernel kills one of them",
        "fewer --processes or --workers, or a higher limit (docker run --memory, sbatch --mem)",
    )
    if _SHM.is_dir():
        free = shutil.disk_usage(_SHM).free
        yield judged(
            f"shared memory, {_SHM}",
            # + 1: exactly the default of a container is a warning, too.
            _compare(free, plan.shared_memory, _CONTAINER_SHM_BYTES + 1),
            f"{format_bytes(free)} free, {format_bytes(plan.shared_memory)} for {plan}",
            "space for microbatches from workers and buffers of NCCL; otherwise loaders hang or "
            "end with a bus error",
            f"docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8G {_SHM}; "
            "or fewer --workers",
        )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY:
        yield judged(
            "open files, ulimit -n",
            _compare(limit, plan.open_files, max(_MIN_OPEN_FILES, 2 * plan.open_files)),
            f"{limit} per process; a rank needs about {plan.open_files}, user code more",
            'room for workers, connections and checkpoints; otherwise "Too many open files"',
            "ulimit -n 65536, or LimitNOFILE= of the service",
        )


def _compare(limit: float, needed: float, comfortable: float) -> Verdict:
    if limit < needed:
        return "fail"
    if limit < comfortable:
        return "warn"
    return "pass"


def _check_folder(path: Path) -> Iterator[Finding]:
    """Check that a run can write; of a missing runs folder, the nearest parent is tried."""
    absolute = path.absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    try:
        free = shutil.disk_usage(existing).free
        missing = unsupported_features(existing)
    except (OSError, SamestepError) as error:
        value = f"{path}: {str(error).splitlines()[0]}"
        fix = "--runs DIR with a writable folder"
        yield Finding("runs folder", "fail", value, "files can be written, synced and renamed", fix)
        return
    value = f"{path} is writable"
    if missing:
        value = f"{value}; without {', '.join(missing)}"
    yield Finding("runs folder", "pass", value)
    yield judged(
        "free space for runs",
        _verdict(free >= _MIN_FREE_BYTES, "warn"),
        format_bytes(free),
        "space for four checkpoints (weights and optimizer state): last two, best, and one being "
        "written",
        "free space, or --runs DIR on another disk; a full disk loses the newest checkpoint only",
    )


def check_launcher(variables: Mapping[str, str]) -> Finding:
    """Check that the variables of a launcher are complete."""
    try:
        found = find_rank_place(variables)
    except InputError as error:
        expected = error.expected or "complete launcher variables"
        fix = error.fix or "unset these variables"
        return Finding("launcher", "fail", error.value, expected, fix)
    value = "none; samestep starts the ranks"
    if found is not None:
        value = f"{found.launcher}, rank {found.rank} of {found.world_size}"
    return Finding("launcher", "pass", value)


# --- self-test ----------------------------------------------------------------------------------


def run_self_test(preload: Sequence[str]) -> tuple[TorchDevices, Finding]:
    """Read torch's devices in one rank, then run a rank per GPU, or two on CPUs.

    Raises:
        StoppedError: a stop was requested; it is no finding about the machine.
    """
    devices = TorchDevices()
    config = LaunchConfig(_HANG_AFTER_SECONDS)
    run = partial(run_on_ranks, __name__, preload=preload, config=config)
    try:
        devices = run("read_devices", processes=1)
        # NCCL needs a GPU for each rank: with fewer than two, ranks connect on CPUs.
        if len(devices.gpus) > 1:
            summary = run("run_rank", ACCELERATOR, processes=min(len(devices.gpus), _MAX_RANKS))
        else:
            summary = run("run_rank", "cpu", processes=2)
        return devices, Finding("self-test", "pass", summary)
    except StoppedError:
        raise
    # RuntimeError: the user's limit of threads.
    except (SamestepError, OSError, EOFError, RuntimeError) as error:
        value = (str(error) or type(error).__name__).splitlines()[0]
        fix = "fix the other failures; if there are none, do not train on this machine"
        return devices, Finding("self-test", "fail", value, "ranks start, connect and sum", fix)


def read_devices() -> TorchDevices:
    """Compute on each GPU that torch sees, in a rank: the parent must not initialize CUDA."""
    import torch

    redirect_to_null([2])  # messages of C++ code; the finding reports the error
    module = accelerator_module()
    if torch.version.cuda is None:
        return TorchDevices(error=f"torch {torch.__version__} is built without CUDA")
    try:
        module.init()
        indices = range(module.device_count())
        for index in indices:
            # `item` waits for the kernel: its errors appear late.
            torch.ones(1, device=torch.device(ACCELERATOR, index)).item()
    except RuntimeError as error:  # no or an old driver, a lost GPU, no kernels for this GPU
        return TorchDevices(error=str(error).splitlines()[0])
    names = tuple(module.get_device_name(index) for index in indices)
    pairs = combinations(indices, 2)
    return TorchDevices(names, tuple(p for p in pairs if not module.can_device_access_peer(*p)))


def run_rank(device: DeviceKind) -> str:
    """Sum over all ranks; runs in every rank, and returns a summary for the report."""
    import torch

    from samestep.session import start

    redirect_to_null([2])
    with start(device=device) as world:
        values = torch.full((1024,), world.rank + 1.0, device=world.device)
        world.all_reduce(values)
        expected = world.size * (world.size + 1) / 2
        if bool((values != expected).any()):
            actual = values.unique().tolist()
            raise RunError(f"the sum over {world.size} ranks is {actual}, not {expected:g}")
        return f"{world.size} ranks on {world.device.type} connected and summed"
