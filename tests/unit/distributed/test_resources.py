"""Processors, limits of control groups from files as Linux writes them, and memory that the allocator keeps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.distributed.resources import CgroupLimits, read_cgroup_limits

GIB = 1 << 30


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_on_every_level(tmp_path: Path) -> None:
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
        },
    )
    assert read_cgroup_limits(root) == CgroupLimits(5 * GIB, 1.5)


def test_no_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }
    assert read_cgroup_limits(write_files(tmp_path, files)) == CgroupLimits()
    assert read_cgroup_limits(tmp_path / "nothing") == CgroupLimits()


# Blocks of 20 MiB are in the heap under the thresholds that glibc adapts to them as well.
_ALLOCATIONS = """
import ctypes, json, resource, sys, threading
from samestep.distributed.resources import keep_freed_memory
accepted = keep_freed_memory() if sys.argv[1] == "keep" else None
libc, size = ctypes.CDLL(None), 20 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [libc.malloc(size) for _ in range(8)]
        for block in blocks:
            libc.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = threading.Thread(target=faults) if sys.argv[2] == "thread" else None
if first is None:
    faults()
else:
    first.start()
    first.join()
print(json.dumps([accepted, faults()]))
"""


def _faults(*arguments: str) -> tuple[bool | None, int]:
    output = subprocess.run(
        [sys.executable, "-c", _ALLOCATIONS, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    accepted, faults = json.loads(output.stdout)
    return accepted, faults


@pytest.mark.parametrize("freed_by", ["main", "thread"])
def test_freed_memory_serves_the_next_allocation(freed_by: str) -> None:
    accepted, faults = _faults("keep", freed_by)
    if not accepted:
        pytest.skip("the C library has no thresholds")
    assert faults < _faults("default", freed_by)[1] / 20
