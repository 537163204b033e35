"""Thresholds of the C library's memory allocator."""

import json
import subprocess
import sys

import pytest

# Blocks of 20 MiB are in the heap under the thresholds that glibc adapts to them as well.
_SCRIPT = """
import ctypes, json, resource, sys, threading
from samestep.distributed.allocator import keep_freed_memory
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


def _run(*arguments: str) -> tuple[bool | None, int]:
    output = subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    accepted, faults = json.loads(output.stdout)
    return accepted, faults


@pytest.mark.parametrize("freed_by", ["main", "thread"])
def test_freed_memory_serves_the_next_allocation(freed_by: str) -> None:
    accepted, faults = _run("keep", freed_by)
    if not accepted:
        pytest.skip("the C library has no thresholds")
    assert faults < _run("default", freed_by)[1] / 20
