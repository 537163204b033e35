"""The example of a loop under `exact` prints one hash, also where libraries could use several threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def hash_of(*arguments: str, threads: int) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_example_has_the_same_bits_on_every_number_of_processes_and_processors() -> None:
    hashes = {hash_of(*processes, threads=threads) for processes, threads in [([], 1), ([], 2), (["8"], 2)]}
    assert len(hashes) == 1
