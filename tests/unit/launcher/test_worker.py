"""Names of ranks in lists of processes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import samestep

RANKS = 3


def process_names() -> list[list[str]]:
    """Return the name, the command line and the begin of the environment of each rank, as other programs see them."""
    with samestep.start(device="cpu") as world:
        texts = [Path("/proc/self", name).read_bytes() for name in ("comm", "cmdline", "environ")]
        return samestep.all_gather([text.decode(errors="replace") for text in texts], world)


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_ranks_have_names() -> None:
    processes = samestep.launch(process_names, processes=RANKS)
    assert [name for name, _, _ in processes] == [f"samestep-{rank}\n" for rank in range(RANKS)]
    assert all("PATH=" in environment for _, _, environment in processes)
    if find_spec("setproctitle") is not None:
        titles = [line.strip("\0") for _, line, _ in processes]
        assert titles == [f"samestep rank {rank} of {RANKS}" for rank in range(RANKS)]
