"""Facts about this machine, and the findings of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from samestep.config import default_workers
from samestep.distributed.devices import visible_devices
from samestep.distributed.env import relevant_variables
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.resources import Processors, read_cgroup_limits, read_processors
from samestep.errors import InputError
from samestep.tools.doctor import environment, gpus, machine, self_test, versions
from samestep.tools.doctor.plan import Finding, Plan


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
    self_test: self_test.SelfTest | None = None  # None if skipped


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
    return replace(facts, self_test=self_test.run_self_test(plan, preload))


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
    yield from self_test.check_self_test(facts.self_test)
    yield from machine.check_folder(facts.folder)
