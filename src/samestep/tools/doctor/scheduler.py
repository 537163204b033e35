"""What torchrun, Slurm or MPI have set: whether it is whole, and whether its parts agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from samestep.errors import InputError
from samestep.runtime.env import read_rendezvous
from samestep.runtime.host_list import count_hosts
from samestep.runtime.processors import Processors
from samestep.runtime.rendezvous import Rendezvous
from samestep.tools.doctor.finding import Finding, Judge, fails, informs, passes, warns

# `2(x3),1`: two tasks on each of three nodes, one on the last.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Launcher:
    """Who started this process, as a command would see it.

    Attributes:
        found: this rank of a job; None where it is no rank.
        refused: why a command would refuse what is set; None where it would not.
    """

    found: Rendezvous | None = None
    refused: InputError | None = None


def read_launcher() -> Launcher:
    """Who started this process."""
    try:
        return Launcher(found=read_rendezvous())
    except InputError as error:
        return Launcher(refused=error)


def check_launcher(launcher: Launcher) -> Iterator[Finding]:
    """Whether a rank knows who it is."""
    name, refused, found = "launcher", launcher.refused, launcher.found
    if refused is not None:
        do = refused.do or "unset these variables"
        yield fails(name, refused.value, rule=refused.rule or "what a launcher sets is whole", do=do)
    elif found is None:
        yield passes(name, "none; samestep starts the ranks")
    else:
        yield passes(name, f"{found.launcher}: {found.why}")
        for other in found.also:
            yield informs("passed over", other)


def check_slurm(variables: Mapping[str, str], processors: Processors) -> Iterator[Finding]:
    """Whether Slurm's numbers of tasks, nodes and processors agree with one another."""
    yield from _check_tasks(variables, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", fails)
    # An allocation of whole nodes may have room for more tasks than were asked for.
    yield from _check_tasks(variables, "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", warns)
    yield from _check_nodes(variables, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")
    yield from _check_nodes(variables, "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST")
    wanted = variables.get("SLURM_CPUS_PER_TASK", "")
    if wanted.isdecimal() and int(wanted) > processors.usable:
        yield warns(
            "SLURM_CPUS_PER_TASK",
            f"is {wanted}, but this process may use {processors.usable}",
            rule="a task may use the processors that the job asked for; since Slurm 22.05 srun does not take the "
            "number from sbatch",
            do=f"srun --cpus-per-task={wanted}, or export SRUN_CPUS_PER_TASK={wanted}",
        )


def _check_tasks(variables: Mapping[str, str], size: str, by_node: str, judge: Judge) -> Iterator[Finding]:
    if size not in variables or by_node not in variables:
        return
    listed, wanted = count_tasks(variables[by_node]), variables[size]
    if str(listed) == wanted:
        yield passes(size, f"{wanted}, as {by_node} has it")
        return
    told = f"{listed} tasks" if listed is not None else "no list"
    yield _disagree(size, wanted, by_node, variables[by_node], told, judge)


def _check_nodes(variables: Mapping[str, str], size: str, nodes: str) -> Iterator[Finding]:
    if size not in variables or nodes not in variables:
        return
    try:
        listed: int | None = count_hosts(variables[nodes])
    except InputError:
        listed = None
    if str(listed) == variables[size]:
        yield passes(size, f"{variables[size]}, as {nodes} has it")
        return
    told = f"{listed} nodes" if listed is not None else "no list"
    yield _disagree(size, variables[size], nodes, variables[nodes], told, fails)


def _disagree(size: str, wanted: str, other: str, text: str, told: str, judge: Judge) -> Finding:
    return judge(
        size,
        f"is {wanted}, but {other} is {text}: {told}",
        rule="ranks wait for as many as there are said to be; with too few they wait until the time is over",
        do="let srun set both (srun -n N), and export none of Slurm's variables by hand; unset those that another job "
        "left in this shell",
    )


def count_tasks(text: str) -> int | None:
    """The tasks in a list such as `2(x3),1`; None if it is none."""
    found = [_TASKS.fullmatch(part) for part in text.split(",")]
    if None in found:
        return None
    return sum(int(part[1]) * int(part[2] or 1) for part in found if part is not None)
