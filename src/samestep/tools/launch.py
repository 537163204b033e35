"""Launch of a function of a tool on ranks, and description of the machine on which they run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from samestep.distributed.resources import usable_processors
from samestep.launcher.launch import LaunchConfig, StoppedError, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.watchdog import HANG_AFTER

_CONFIG = LaunchConfig(HANG_AFTER)


def run_on_ranks(
    module: str,
    function: str,
    *arguments: Any,
    processes: int,
    preload: Sequence[str],
    environment: Mapping[str, str] | None = None,
    config: LaunchConfig = _CONFIG,
) -> Any:
    """Run a function of `module`, which ranks import in advance, and return the result of rank 0.

    Raises:
        RankError: a rank failed.
        StoppedError: a stop was requested, after which a rank can return None. No checkpoint was
            written, so nothing can be resumed.
    """
    stopped = StoppedError("stopped on request", fix="start the command again")
    try:
        result = run_workers(
            ByName(module, function),
            *arguments,
            processes=processes,
            launch_config=config,
            preload=(*preload, module),
            environment=environment,
        )
    except StoppedError as error:
        raise stopped from error
    if result.value is None or result.stop_signal is not None:
        raise stopped
    return result.value


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    """Return device, names of the GPUs, cores, versions, date and load."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # On Linux, `platform` knows the architecture alone.
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return {
        "device": next(iter(gpus), processor),
        "gpus": gpus,
        "cores": usable_processors(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "samestep": version("samestep"),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2),  # other programs explain slow steps
    }
