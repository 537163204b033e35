"""Thresholds of the C library's memory allocator."""

import json
import resource
import subprocess
import sys

import pytest

_SCRIPT = """
import json, resource, sys, torch
from samestep.distributed.allocator import keep_freed_memory
accepted = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        tensors = [torch.ones(10 * 2**20) for _ in range(2)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(json.dumps([accepted, faults()]))
"""


def _run(argument: str) -> tuple[bool | None, int]:
    output = subprocess.run([sys.executable, "-c", _SCRIPT, argument], check=True, stdout=subprocess.PIPE, text=True)
    accepted, faults = json.loads(output.stdout)
    return accepted, faults


def test_freed_memory_serves_the_next_allocation() -> None:
    pages = 6 * 2 * 40 * 2**20 // resource.getpagesize()
    accepted, faults = _run("keep")
    if not accepted:
        pytest.skip("the C library has no thresholds")
    assert faults < pages / 2
    assert _run("default")[1] > 0.9 * pages
