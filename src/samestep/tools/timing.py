"""Launch of trials, their timings, and the description of the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from samestep.distributed.resources import usable_processors
from samestep.launcher.launch import LaunchConfig, StoppedError, run_workers
from samestep.launcher.pickling import ByName
from samestep.launcher.watchdog import HANG_AFTER


@dataclass(frozen=True)
class Timing:
    """Means over some steps."""

    step_seconds: float  # time of a step, including the wait for its batch
    data_share: float  # part of that time spent waiting for batches
    samples_per_second: float  # over all ranks


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        several = [*values, *values] if len(values) == 1 else values
        q1, median, q3 = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, q1, q3)

    def format(self, number: str) -> str:
        """Return the median ± half of the interquartile range, each in a number format."""
        return f"{self.median:{number}} ± {(self.q3 - self.q1) / 2:{number}}"


@contextmanager
def stop_errors(problem: str) -> Iterator[None]:
    """Report a stop of ranks without checkpoints, from which nothing can be resumed."""
    try:
        yield
    except StoppedError as error:
        raise StoppedError(problem, fix="start the command again") from error


def run_trial(
    module: str,
    function: str,
    *arguments: Any,
    processes: int,
    preload: Sequence[str],
    environment: Mapping[str, str] | None = None,
    hang_after: float = HANG_AFTER,
) -> Any:
    """Run a function of `module`, which ranks import in advance, on all ranks; return the result of rank 0.

    Raises:
        RankError: a rank failed.
        StoppedError: a stop was requested.
    """
    with stop_errors("stopped on request"):
        result = run_workers(
            ByName(module, function),
            *arguments,
            processes=processes,
            launch_config=LaunchConfig(hang_after),
            preload=(*preload, module),
            environment=environment,
        )
        if result.value is None or result.stop_signal is not None:
            raise StoppedError("stopped")
    return result.value


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    """Return device, cores, versions, date and load.

    Args:
        gpus: names of the GPUs.
    """
    return {
        "device": gpus[0] if gpus else _processor_name(),
        "gpus": gpus,
        "cores": usable_processors(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "samestep": version("samestep"),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _processor_name() -> str:
    """Return the model name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
