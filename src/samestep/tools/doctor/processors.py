"""The processors that this process may use, against ranks and threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.runtime.env import read_environment
from samestep.tools.doctor.finding import Finding, informs, passes, warns
from samestep.tools.doctor.plan import Plan


@dataclass(frozen=True)
class Processors:
    """How many there are.

    Attributes:
        online: of the machine.
        allowed: on which this process may run, by its affinity.
        quota: processors' worth of time that its control group gives it, if that has a limit.
    """

    online: int
    allowed: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many compute at the same time; 1 at least."""
        return max(1, min(self.allowed, math.floor(self.quota) if self.quota is not None else self.allowed))


def read_processors(quota: float | None) -> Processors:
    """Those of this process."""
    return Processors(os.cpu_count() or 1, read_environment().cores, quota)


def check_processors(processors: Processors) -> Finding:
    """Whether what counts processors counts right."""
    name, allowed, quota = "processors", processors.allowed, processors.quota
    if quota is not None and quota < allowed:
        return warns(
            name,
            f"the control group gives {quota:g} processors' worth of time, but {allowed} are counted",
            rule="what counts processors, --processes auto too, sees those of the affinity",
            do=f"--processes {processors.usable} in place of auto, or a higher quota (docker run --cpus, a pod's "
            "resources.limits.cpu)",
        )
    if allowed < processors.online:
        return informs(name, f"{allowed} of {processors.online} by affinity")
    return passes(name, f"{allowed}")


def check_load(processors: Processors, plan: Plan) -> Iterator[Finding]:
    """Whether ranks, threads and workers find a processor each."""
    usable, threads = processors.usable, plan.processes * plan.threads
    there = f"{usable} processor{'s' if usable > 1 else ''}"
    if threads > usable:
        yield warns(
            "processes x threads",
            f"{plan.processes} x {plan.threads} = {threads} on {there}",
            rule="every thread that computes has a processor; results are the same, only later",
            do=f"--processes {max(1, usable // plan.threads)}, or step.threads: {max(1, usable // plan.processes)}",
        )
    else:
        yield passes("processes x threads", f"{plan.processes} x {plan.threads} on {there}")
    busy = threads + plan.processes * plan.workers
    if plan.workers and busy > 2 * usable:
        yield warns(
            "workers",
            f"{plan.workers} a rank: {busy} processes and threads on {there}",
            rule="ranks and their workers share the processors",
            do=f"--workers {max(0, usable // plan.processes - plan.threads)}",
        )
    else:
        yield informs("workers", f"{plan.workers or 'none'}{' a rank' if plan.workers else ''}")
