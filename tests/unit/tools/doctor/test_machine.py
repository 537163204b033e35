"""What is judged of processors, memory, limits and the clock, by facts that are planted."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.runtime.processors import Processors
from samestep.tools.doctor.clock import Clock, check_clock, read_clock
from samestep.tools.doctor.finding import Finding, informs, passes, size_text, warns, worst
from samestep.tools.doctor.limits import Limits, check_files, check_locked_memory, check_sizes, check_tasks
from samestep.tools.doctor.memory import Memory, check_address_space, check_memory, check_shared_memory
from samestep.tools.doctor.plan import Plan
from samestep.tools.doctor.processors import check_load, check_processors

GIB = 1 << 30
PLAN = Plan(Path("runs"), processes=4, workers=2, threads=1)
SOUND = Memory(total=64 * GIB, available=60 * GIB, shared_total=32 * GIB, shared_free=32 * GIB)


def test_a_quota_below_what_is_there() -> None:
    found = check_processors(Processors(online=64, allowed=64, quota=2.5))
    assert (found.verdict, found.value.split(":")[0]) == ("info", "2 of 64")
    assert check_processors(Processors(64, 64, 0.5)).verdict == "warn"
    assert check_processors(Processors(64, 64, 64.0)).verdict == "pass"
    assert check_processors(Processors(64, 8)).verdict == "info"


@pytest.mark.parametrize(
    ("processors", "verdicts"),
    [
        (Processors(16, 16), ["pass", "info"]),
        (Processors(4, 4), ["pass", "warn"]),  # 4 ranks and 8 workers
        (Processors(16, 16, 1.0), ["warn", "warn"]),
    ],
)
def test_load(processors: Processors, verdicts: list[str]) -> None:
    assert [finding.verdict for finding in check_load(processors, PLAN)] == verdicts


def test_memory_of_machine_and_group() -> None:
    assert check_memory(SOUND, PLAN).verdict == "pass"
    assert check_memory(replace(SOUND, available=PLAN.memory - 1), PLAN).verdict == "fail"
    assert check_memory(replace(SOUND, available=PLAN.memory + 1), PLAN).verdict == "warn"
    found = check_memory(replace(SOUND, group=8 * GIB, group_left=GIB), PLAN)
    assert found.verdict == "fail"
    assert "1 GiB left by the control group's limit" in found.value
    assert check_memory(SOUND, replace(PLAN, workers=10, worker_bytes=2 * GIB)).verdict == "fail"


def test_shared_memory() -> None:
    assert check_shared_memory(SOUND, PLAN).verdict == "pass"
    container = replace(SOUND, shared_total=64 << 20, shared_free=64 << 20)
    assert check_shared_memory(container, PLAN).verdict == "fail"
    assert check_shared_memory(container, replace(PLAN, workers=0)).verdict == "warn"
    assert check_shared_memory(replace(SOUND, shared_total=None), PLAN).verdict == "info"


def test_address_space() -> None:
    assert check_address_space(SOUND, gpus=8).verdict == "pass"
    limited = replace(SOUND, addresses=16 * GIB)
    assert check_address_space(limited, gpus=0).verdict == "info"
    assert check_address_space(limited, gpus=1).verdict == "fail"


def test_limits() -> None:
    assert check_files(Limits(files=20000), PLAN).verdict == "pass"
    assert check_files(Limits(files=512), PLAN).verdict == "warn"
    assert check_files(Limits(files=64), PLAN).verdict == "fail"
    assert check_files(Limits(), PLAN).verdict == "pass"
    assert [each.verdict for each in check_tasks(Limits(tasks=4096, tasks_now=4000), PLAN)] == ["fail"]
    assert [each.verdict for each in check_tasks(Limits(group_tasks_left=50), PLAN)] == ["pass", "fail"]
    assert check_locked_memory(Limits(locked=65536)).verdict == "pass"
    assert check_locked_memory(Limits(locked=65536, has_infiniband=True)).verdict == "warn"
    assert [each.verdict for each in check_sizes(Limits(file_size=5 * GIB, core=0))] == ["pass", "warn", "info"]
    assert "no limit" in [each.value for each in check_sizes(Limits())][-1]


def test_clock() -> None:
    now = time.time()
    assert check_clock(read_clock()).verdict == "pass"
    assert check_clock(Clock(now, 0.02, 0.0)).verdict == "fail"
    assert check_clock(Clock(now, -3600.0, 0.02)).verdict == "warn"
    assert "1970-01-02" in check_clock(Clock(86400.0, 0.02, 0.02)).value


def test_the_worst_counts() -> None:
    good, told, bad = passes("a", "b"), informs("a", "b"), warns("a", "b", rule="c", do="d")
    assert worst([]) == "pass"
    assert worst([told, good]) == "pass"
    assert worst([bad, good]) == "warn"
    assert worst([bad, Finding("a", "fail", "b"), good]) == "fail"


def test_sizes_are_told_short() -> None:
    shown = [size_text(size) for size in (0, 1000, 64 << 20, 1.5 * GIB, 300 * GIB, 2 << 40)]
    assert shown == ["0 bytes", "1000 bytes", "64 MiB", "1.5 GiB", "300 GiB", "2.0 TiB"]
