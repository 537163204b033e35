"""Tests of the checks of processors, memory and limits."""

from dataclasses import replace
from pathlib import Path

import pytest

from samestep.distributed.resources import Processors
from samestep.tools.doctor.findings import Finding, Plan, judged, worst
from samestep.tools.doctor.machine import Resources, check_limits, check_memory, check_processors

GIB = 1 << 30
PLAN = Plan(Path("runs"), processes=4, workers=2, threads=1)
SUFFICIENT = Resources(64 * GIB, 60 * GIB, shm_total=32 * GIB, shm_free=32 * GIB)


@pytest.mark.parametrize(
    ("processors", "verdicts"),
    [
        (Processors(online=64, allowed=64, quota=64.0), ["pass", "pass"]),
        (Processors(online=64, allowed=8), ["info", "pass"]),
        (Processors(online=64, allowed=64, quota=2.5), ["info", "warn"]),
        (Processors(online=64, allowed=64, quota=0.5), ["warn", "warn"]),
    ],
)
def test_processors(processors: Processors, verdicts: list[str]) -> None:
    assert [finding.verdict for finding in check_processors(processors, PLAN)] == verdicts


def test_processors_rounds_a_quota_down() -> None:
    finding = next(check_processors(Processors(online=64, allowed=64, quota=2.5), PLAN))
    assert finding.value.startswith("2 of 64")


def memory_verdicts(resources: Resources, plan: Plan = PLAN) -> list[str]:
    """Return the verdicts on memory and shared memory."""
    return [finding.verdict for finding in check_memory(resources, plan)]


def test_memory_of_machine_and_control_group() -> None:
    assert memory_verdicts(SUFFICIENT) == ["pass", "pass"]
    assert memory_verdicts(replace(SUFFICIENT, memory_available=PLAN.memory - 1)) == ["fail", "pass"]
    assert memory_verdicts(replace(SUFFICIENT, memory_available=PLAN.memory + 1)) == ["warn", "pass"]
    finding = next(check_memory(replace(SUFFICIENT, cgroup_memory=GIB), PLAN))
    assert finding.verdict == "fail"
    assert "1 GiB left in the control group" in finding.value
    assert memory_verdicts(SUFFICIENT, replace(PLAN, workers=10, worker_bytes=2 * GIB)) == ["fail", "pass"]


def test_shared_memory() -> None:
    container = replace(SUFFICIENT, shm_total=64 << 20, shm_free=64 << 20)
    assert memory_verdicts(container) == ["pass", "fail"]
    assert memory_verdicts(container, replace(PLAN, workers=0)) == ["pass", "warn"]
    assert memory_verdicts(replace(SUFFICIENT, shm_total=None)) == ["pass", "info"]


@pytest.mark.parametrize(
    ("open_files", "tasks", "verdicts"),
    [
        (None, None, ["pass"]),
        (20000, None, ["pass"]),
        (512, None, ["warn"]),
        (64, None, ["fail"]),
        (None, 50, ["pass", "fail"]),
        (None, 5000, ["pass"]),
    ],
)
def test_limits(open_files: int | None, tasks: int | None, verdicts: list[str]) -> None:
    resources = replace(SUFFICIENT, open_files=open_files, cgroup_tasks=tasks)
    assert [finding.verdict for finding in check_limits(resources, PLAN)] == verdicts


def test_worst_verdict() -> None:
    pass_, info_, warn = Finding("a", "pass", "b"), Finding("a", "info", "b"), Finding("a", "warn", "b", "c", "d")
    assert worst([]) == "pass"
    assert worst([info_, pass_]) == "pass"
    assert worst([warn, pass_]) == "warn"
    assert worst([warn, Finding("a", "fail", "b"), pass_]) == "fail"


def test_expectation_and_fix_belong_to_warnings_and_failures() -> None:
    assert judged("a", "pass", "b", "c", "d") == Finding("a", "pass", "b")
    assert judged("a", "warn", "b", "c", "d") == Finding("a", "warn", "b", "c", "d")
