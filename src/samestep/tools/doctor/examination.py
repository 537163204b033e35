"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.tools.doctor import (
    clock,
    devices,
    files,
    limits,
    links,
    meeting,
    memory,
    network,
    processors,
    scheduler,
    self_test,
    variables,
    versions,
)
from samestep.tools.doctor.facts import Facts
from samestep.tools.doctor.finding import Finding


def examine(facts: Facts) -> list[Finding]:
    """What the facts mean for a run."""
    return [*_libraries(facts), *_devices(facts), *_machine(facts), *_between_ranks(facts), *_folder(facts)]


def _libraries(facts: Facts) -> Iterator[Finding]:
    view = facts.self_test.view if facts.self_test is not None else None
    yield from versions.check_packages(facts.versions)
    yield from versions.check_builds(facts.versions, facts.nvidia)
    yield from versions.check_nccl(facts.versions, view.nccl if view is not None else None)
    yield from variables.check_variables(facts.variables)
    yield from variables.check_thread_variables(facts.variables, facts.processors)


def _devices(facts: Facts) -> Iterator[Finding]:
    view = facts.self_test.view if facts.self_test is not None else None
    yield from devices.check_gpus(facts.nvidia, view)
    yield from devices.check_visible(facts.variables, facts.nvidia)
    yield from devices.check_peers(view)
    yield from devices.check_tenants(facts.nvidia)


def _machine(facts: Facts) -> Iterator[Finding]:
    plan, view = facts.plan, facts.self_test.view if facts.self_test is not None else None
    gpus = max(len(facts.nvidia.cards), len(view.gpus) if view is not None else 0)
    yield processors.check_processors(facts.processors)
    yield from processors.check_load(facts.processors, plan)
    yield memory.check_memory(facts.memory, plan)
    yield memory.check_shared_memory(facts.memory, plan)
    yield memory.check_address_space(facts.memory, gpus)
    yield limits.check_files(facts.limits, plan)
    yield from limits.check_tasks(facts.limits, plan)
    yield limits.check_locked_memory(facts.limits)
    yield from limits.check_sizes(facts.limits)
    yield clock.check_clock(facts.clock)


def _between_ranks(facts: Facts) -> Iterator[Finding]:
    yield from scheduler.check_launcher(facts.launcher)
    yield from scheduler.check_slurm(facts.variables, facts.processors)
    yield network.check_host_name(facts.network)
    yield from network.check_loopback(facts.network)
    yield from network.check_interfaces(facts.network, facts.variables)
    yield from meeting.check_meeting(facts.meeting)
    yield from self_test.check_self_test(facts.self_test)
    if facts.self_test is not None and facts.self_test.met is not None:
        yield from links.check_bandwidth(facts.self_test.met, facts.nvidia)


def _folder(facts: Facts) -> Iterator[Finding]:
    yield from files.check_folder(facts.folder)
    yield files.check_times(facts.folder)
