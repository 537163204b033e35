"""Processors, and limits of control groups from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from samestep.distributed.resources import CgroupLimits, Processors, read_cgroup_limits, read_processors

GIB = 1 << 30


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_on_every_level(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/box"
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
            f"{group}/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            f"{group}/pids.max": "100\n",
            f"{group}/pids.current": "88\n",
        },
    )
    assert read_cgroup_limits(root) == CgroupLimits(8 * GIB, 5 * GIB, 1.5, 12)


def test_version_1_with_the_container_as_root(tmp_path: Path) -> None:
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n1:cpu,cpuacct:/docker/0123\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 0\ntotal_inactive_file 1024\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_cgroup_limits(root) == CgroupLimits(2 * GIB, GIB + 1024, 4.0, None)


def test_no_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_cgroup_limits(write_files(tmp_path, files)) == CgroupLimits()
    assert read_cgroup_limits(tmp_path / "nothing") == CgroupLimits()


def test_affinity_limits_processors() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert read_processors().allowed == 1
    finally:
        os.sched_setaffinity(0, before)
    assert read_processors().allowed == len(before)


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (64.0, 8), (2.5, 2), (0.5, 1)])
def test_quota_limits_processors(quota: float | None, usable: int) -> None:
    assert Processors(online=16, allowed=8, quota=quota).usable == usable
