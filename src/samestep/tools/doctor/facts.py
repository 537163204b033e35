"""All that is looked at, read in one place, so that every check is a function of what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.config import default_workers
from samestep.runtime.cgroups import read_control_groups
from samestep.runtime.devices import visible
from samestep.runtime.env import watched_variables
from samestep.runtime.processors import Processors, read_processors
from samestep.tools.doctor.clock import Clock, read_clock
from samestep.tools.doctor.files import Folder, read_folder
from samestep.tools.doctor.limits import Limits, read_limits
from samestep.tools.doctor.meeting import Meeting, read_meeting
from samestep.tools.doctor.memory import Memory, read_memory
from samestep.tools.doctor.network import Network, read_network
from samestep.tools.doctor.nvidia import Nvidia, read_nvidia
from samestep.tools.doctor.plan import Plan, Wishes
from samestep.tools.doctor.scheduler import Launcher, read_launcher
from samestep.tools.doctor.self_test import SelfTest, run_self_test
from samestep.tools.doctor.versions import Versions, read_versions


@dataclass(frozen=True)
class Facts:
    """What was found here.

    Attributes:
        plan: what is to run, with what was left open settled by what is here.
        variables: of the environment, those that matter.
        meeting: where ranks are told to meet, if they are told.
        self_test: None where it was left out.
    """

    plan: Plan
    variables: Mapping[str, str]
    versions: Versions
    nvidia: Nvidia
    processors: Processors
    memory: Memory
    limits: Limits
    network: Network
    meeting: Meeting | None
    launcher: Launcher
    folder: Folder
    clock: Clock
    self_test: SelfTest | None = None


def read_facts(wishes: Wishes, *, preload: Sequence[str], quick: bool, tell: Callable[[str], None]) -> Facts:
    """Look at everything.

    Args:
        preload: what the process imports that ranks are forked from.
        quick: start no rank: torch is not asked, and no time goes into a self-test.
        tell: takes what is being done, where it takes seconds.
    """
    variables, launcher, nvidia, groups = watched_variables(), read_launcher(), read_nvidia(), read_control_groups()
    processors = read_processors()
    plan = _settled(wishes, launcher, nvidia, variables, processors)
    facts = Facts(
        plan=plan,
        variables=variables,
        versions=read_versions(),
        nvidia=nvidia,
        processors=processors,
        memory=read_memory(groups),
        limits=read_limits(groups),
        network=read_network(plan.processes + 1),
        meeting=read_meeting(launcher.found, variables),
        launcher=launcher,
        folder=read_folder(plan.runs),
        clock=read_clock(),
    )
    # Ranks of another launcher each run a doctor; one of them tests.
    if quick or facts.network.loopback is not None or (launcher.found is not None and launcher.found.rank > 0):
        return facts
    tell("starting ranks that test themselves; --quick leaves this out")
    return replace(facts, self_test=run_self_test(plan, preload))


def _settled(
    wishes: Wishes, launcher: Launcher, nvidia: Nvidia, variables: Mapping[str, str], processors: Processors
) -> Plan:
    """What is to run: where nobody says, what `samestep train --processes auto` would start."""
    gpus = len(visible(variables.get("CUDA_VISIBLE_DEVICES"), len(nvidia.cards)))
    told = launcher.found.local_size if launcher.found is not None else None
    processes = wishes.processes or told or gpus or processors.usable
    workers = default_workers(processors.usable, processes) if wishes.workers is None else wishes.workers
    return replace(wishes.plan, processes=processes, workers=workers)
