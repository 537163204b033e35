"""All checks of a machine in the order of the report, and the self-test, a collective of real ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

from samestep.config import DeviceKind
from samestep.distributed.devices import ACCELERATOR, accelerator_module
from samestep.distributed.env import relevant_variables
from samestep.distributed.resources import usable_processors
from samestep.errors import RunError, SamestepError
from samestep.launcher.launch import StoppedError
from samestep.tools.doctor import machine, software
from samestep.tools.doctor.findings import Finding, Plan
from samestep.tools.doctor.gpus import Nvidia, TorchDevices, check_gpus
from samestep.tools.timing import run_trial

_HANG_AFTER_SECONDS = 40.0
_MAX_RANKS = 8


def check_machine(
    plan: Plan, nvidia: Nvidia, runs: Path, *, quick: bool, preload: Sequence[str]
) -> Iterator[Finding]:
    """Run all checks.

    Args:
        plan: planned run, with which memory and limits are compared.
        nvidia: result of `read_nvidia`.
        runs: runs folder.
        quick: skip the self-test, so that torch is not imported.
        preload: modules that the fork server imports.
    """
    variables = relevant_variables()
    devices = None
    self_test = Finding("self-test", "info", "skipped")
    if not quick:
        devices, self_test = run_self_test(preload)
    yield from software.check_packages()
    yield software.check_torch_build(software.read_torch_build(), nvidia.driver)
    yield from software.check_variables(variables, usable_processors())
    yield from check_gpus(nvidia, devices)
    yield from machine.check_resources(plan)
    yield machine.check_launcher(variables)
    yield from machine.check_folder(runs)
    yield self_test


def run_self_test(preload: Sequence[str]) -> tuple[TorchDevices, Finding]:
    """Read torch's devices in one rank, then run one rank per GPU, or two ranks on the CPU with fewer than two GPUs.

    Raises:
        StoppedError: a stop was requested; it is no finding about the machine.
    """
    devices = TorchDevices()
    run = partial(run_trial, __name__, preload=preload, hang_after=_HANG_AFTER_SECONDS)
    try:
        devices = run("read_devices", processes=1)
        if len(devices.gpus) > 1:
            summary = run("run_rank", ACCELERATOR, processes=min(len(devices.gpus), _MAX_RANKS))
        else:
            summary = run("run_rank", "cpu", processes=2)
        return devices, Finding("self-test", "pass", summary)
    except StoppedError:
        raise
    except (
        SamestepError,
        OSError,
        EOFError,
        RuntimeError,
    ) as error:  # RuntimeError: the user's limit of threads
        value = (str(error) or type(error).__name__).splitlines()[0]
        fix = "fix the other failures; if there are none, do not train on this machine"
        return devices, Finding("self-test", "fail", value, "ranks start, connect and sum", fix)


def read_devices() -> TorchDevices:
    """Compute on each GPU that torch sees; runs in a rank, since CUDA must not initialize in the parent process."""
    import torch

    silence_stderr()
    module = accelerator_module()
    if torch.version.cuda is None:
        return TorchDevices()
    try:
        module.init()
        indices = range(module.device_count())
        for index in indices:
            torch.ones(1, device=torch.device(ACCELERATOR, index)).item()
    except (
        RuntimeError
    ) as error:  # no driver, an old driver, a lost GPU, no kernels for this GPU generation
        return TorchDevices(error=str(error).splitlines()[0])
    names = tuple(module.get_device_name(index) for index in indices)
    unlinked = tuple(
        pair for pair in combinations(indices, 2) if not module.can_device_access_peer(*pair)
    )
    return TorchDevices(names, unlinked)


def silence_stderr() -> None:
    """Drop messages of C++ code; the finding reports the error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def run_rank(device: DeviceKind) -> str:
    """Sum over all ranks; runs in every rank, and returns a summary for the report."""
    import torch

    from samestep.session import start

    silence_stderr()
    with start(device=device) as world:
        values = torch.full((1024,), world.rank + 1.0, device=world.device)
        world.all_reduce(values)
        expected = world.size * (world.size + 1) / 2
        if bool((values != expected).any()):
            raise RunError(
                f"the sum over {world.size} ranks is {values.unique().tolist()}, not {expected:g}"
            )
        return f"{world.size} ranks on {world.device.type} connected and summed"
