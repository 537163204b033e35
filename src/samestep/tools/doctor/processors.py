"""The processors that this process may use, against ranks and threads."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.runtime.processors import Processors
from samestep.tools.doctor.finding import Finding, informs, passes, warns
from samestep.tools.doctor.plan import Plan


def check_processors(processors: Processors) -> Finding:
    """How many there are, and what narrows them."""
    name, allowed, quota = "processors", processors.allowed, processors.quota
    if quota is not None and quota < 1:
        return warns(
            name,
            f"the control group gives {quota:g} of one processor's time",
            rule="a rank that computes has a processor; results are the same, only later",
            do="a higher quota (docker run --cpus, a pod's resources.limits.cpu)",
        )
    if quota is not None and quota < allowed:
        return informs(name, f"{processors.usable} of {processors.online}: the control group gives {quota:g} of time")
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
