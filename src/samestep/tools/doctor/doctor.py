"""Facts about this machine, a short run of real ranks, and the findings of all checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from samestep.config import DeviceKind, default_workers
from samestep.distributed.devices import ACCELERATOR, accelerator_module, visible_devices
from samestep.distributed.env import relevant_variables
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.resources import Processors, read_cgroup_limits, read_processors
from samestep.errors import InputError, RunError, SamestepError
from samestep.launcher.launch import LaunchConfig, StoppedError, run_workers
from samestep.launcher.pickling import ByName
from samestep.tools.doctor import environment, gpus, machine, versions
from samestep.tools.doctor.findings import Finding, Plan, judged
from samestep.tools.doctor.gpus import TorchDevices
from samestep.units import format_bytes

_HANG_AFTER_SECONDS = 40.0
_MAX_RANKS = 8
# A worker that cannot send a microbatch reports on its own stderr only.
_WORKER_SECONDS = 20


@dataclass(frozen=True)
class SelfTest:
    """Result of the self-test: a summary, or the report of a failure."""

    devices: TorchDevices
    summary: str = ""
    error: str | None = None


def run_self_test(plan: Plan, preload: Sequence[str]) -> SelfTest:
    """Read torch's devices in one rank, then run one rank per GPU, or two ranks on the CPU with fewer than two GPUs.

    `preload` are the modules that the fork server imports.

    Raises:
        StoppedError: a stop was requested; it is no finding about the machine.
    """
    devices = TorchDevices()
    try:
        devices = _launch("read_devices", processes=1, preload=preload)
        gpus = len(devices.gpus)
        device, processes = (ACCELERATOR, min(gpus, _MAX_RANKS)) if gpus > 1 else ("cpu", 2)
        summary = _launch("run_rank", device, plan.microbatch_bytes, processes=processes, preload=preload)
        return SelfTest(devices, summary)
    except StoppedError as error:
        raise StoppedError("the self-test was stopped", fix="start the command again") from error
    except (SamestepError, OSError, EOFError, RuntimeError) as error:  # RuntimeError: the user's limit of threads
        return SelfTest(devices, error=str(error) or type(error).__name__)


def _launch(function: str, *arguments: Any, processes: int, preload: Sequence[str]) -> Any:
    config = LaunchConfig(_HANG_AFTER_SECONDS)
    run = ByName(__name__, function)
    result = run_workers(run, *arguments, processes=processes, launch_config=config, preload=preload)
    if result.stop_signal is not None:  # ranks end before the request has an effect
        raise StoppedError("stopped on request")
    return result.value


def read_devices() -> TorchDevices:
    """Compute on each GPU that torch sees; runs in a rank, since CUDA must not initialize in the parent process."""
    import torch

    _silence_stderr()
    module = accelerator_module()
    if torch.version.cuda is None:
        return TorchDevices()
    try:
        module.init()
        indices = range(module.device_count())
        for index in indices:
            torch.ones(1, device=torch.device(ACCELERATOR, index)).item()
    except RuntimeError as error:  # no driver, an old driver, a lost GPU, no kernels for this GPU generation
        return TorchDevices(error=str(error).splitlines()[0])
    return TorchDevices(tuple(module.get_device_name(index) for index in indices))


def _silence_stderr() -> None:
    """Drop messages of C++ code and workers; the finding reports the error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def run_rank(device: DeviceKind, microbatch_bytes: int) -> str:
    """Sum over all ranks and receive microbatches from a worker; runs in every rank.

    Returns:
        Summary for the report.
    """
    import torch
    from torch.utils.data import DataLoader

    from samestep.session import start

    _silence_stderr()
    with start(device=device) as world:
        values = torch.full((1024,), world.rank + 1.0, device=world.device)
        world.all_reduce(values)
        expected = world.size * (world.size + 1) / 2
        if bool((values != expected).any()):
            wrong = float(values[values != expected][0])
            raise RunError(f"the sum of 1 to {world.size} over {world.size} ranks is {wrong:g}, not {expected:g}")
        microbatches = [torch.full((microbatch_bytes,), value, dtype=torch.uint8) for value in range(2)]
        loader: DataLoader[torch.Tensor] = DataLoader(
            microbatches,  # type: ignore[arg-type]  # torch accepts any sequence
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
            timeout=_WORKER_SECONDS,
        )
        for index, microbatch in enumerate(loader):
            if not bool((microbatch == index).all()):
                raise RunError(f"a worker sent a microbatch of {index}, received {microbatch.unique().tolist()}")
        name, resident = "the CPU" if device == "cpu" else "GPUs", format_bytes(psutil.Process().memory_info().rss)
        return f"{world.size} ranks on {name} connected, summed and received microbatches; {resident} per rank"


def check_self_test(test: SelfTest | None) -> Iterator[Finding]:
    """Check that the ranks started, connected and computed the correct sum."""
    if test is None:
        yield Finding("self-test", "info", "skipped: --quick, no loopback interface, or a rank other than 0")
        return
    yield judged(
        "self-test",
        "pass" if test.error is None else "fail",
        test.summary if test.error is None else test.error.splitlines()[0],
        "ranks start, connect, sum, and receive a microbatch from a worker",
        "fix the failures above; if there are none, do not train on this machine, and send a report: samestep doctor "
        "--bundle FILE",
    )


@dataclass(frozen=True)
class Facts:
    """Facts that the checks judge, and that a bug report contains."""

    plan: Plan  # planned processes, with defaults resolved for this machine
    variables: Mapping[str, str]  # environment variables that affect a run
    versions: versions.Versions
    nvidia: gpus.Nvidia
    processors: Processors
    resources: machine.Resources
    loopback_error: str | None
    launcher: Rendezvous | InputError | None
    folder: machine.Folder
    self_test: SelfTest | None = None  # None if skipped


def read_facts(
    plan: Plan,
    *,
    ranks: int | None,
    workers: int | None,
    preload: Sequence[str],
    quick: bool,
    progress: Callable[[str], None],
) -> Facts:
    """Read all facts about this machine, with a self-test unless `quick`; `preload` are modules for the fork server.

    Without `ranks`, the plan has those of the launcher, else of `--processes auto`; without `workers`, the default of
    a recipe that reads files. `progress` receives a message before a step that takes seconds.
    """
    variables, nvidia, processors = relevant_variables(), gpus.read_nvidia(), read_processors()
    launcher = environment.read_launcher()
    rank, local_size = (launcher.rank, launcher.local_size) if isinstance(launcher, Rendezvous) else (0, None)
    visible = len(visible_devices(variables.get("CUDA_VISIBLE_DEVICES"), len(nvidia.gpus)))
    ranks = ranks or local_size or visible or processors.usable
    workers = default_workers(processors.usable, ranks) if workers is None else workers
    plan = replace(plan, processes=ranks, workers=workers)
    facts = Facts(
        plan=plan,
        variables=variables,
        versions=versions.read_versions(),
        nvidia=nvidia,
        processors=processors,
        resources=machine.read_resources(read_cgroup_limits()),
        loopback_error=environment.loopback_error(),
        launcher=launcher,
        folder=machine.read_folder(plan.runs),
    )
    # Every rank of another launcher may run doctor; only rank 0 starts the self-test.
    if quick or facts.loopback_error is not None or rank > 0:
        return facts
    progress("starting ranks for the self-test; --quick skips this")
    return replace(facts, self_test=run_self_test(plan, preload))


def check(facts: Facts) -> Iterator[Finding]:
    """Run all checks, in the order of the report."""
    plan, variables, processors = facts.plan, facts.variables, facts.processors
    yield from versions.check_packages(facts.versions)
    yield from versions.check_builds(facts.versions, facts.nvidia)
    yield from environment.check_variables(variables, processors)
    yield from gpus.check_gpus(facts.nvidia, facts.self_test.devices if facts.self_test is not None else None)
    yield from gpus.check_visible_devices(variables, facts.nvidia)
    yield from gpus.check_gpu_memory(facts.nvidia)
    yield from machine.check_processors(processors, plan)
    yield from machine.check_memory(facts.resources, plan)
    yield from machine.check_limits(facts.resources, plan)
    yield from environment.check_launcher(facts.launcher, variables, processors)
    yield from environment.check_network(facts.loopback_error)
    yield from environment.check_interfaces(variables, psutil.net_if_addrs())
    yield from environment.check_rendezvous_address(facts.launcher)
    yield from check_self_test(facts.self_test)
    yield from machine.check_folder(facts.folder)
