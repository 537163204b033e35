"""Limits of control groups, from files as Linux shows them."""

from pathlib import Path

from samestep.runtime.cgroups import ControlGroups, read_control_groups

GIB = 1 << 30


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_groups_of_version_2_on_every_level(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/box"
    root = written(
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
    assert read_control_groups(root) == ControlGroups(8 * GIB, 5 * GIB, 1.5, 12)


def test_groups_of_version_1_that_a_container_mounts_as_the_root(tmp_path: Path) -> None:
    root = written(
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
    assert read_control_groups(root) == ControlGroups(2 * GIB, GIB + 1024, 4.0, None)


def test_groups_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_control_groups(written(tmp_path, files)) == ControlGroups()
    assert read_control_groups(tmp_path / "nothing") == ControlGroups()
