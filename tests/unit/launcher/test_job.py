"""Jobs of other launchers: the address of the store, and connections of ranks."""

import subprocess
import sys
from datetime import timedelta

import pytest

from helpers.started import free_port
from helpers.system import IMPORT_PATH
from samestep.distributed.launcher_detection import Rendezvous
from samestep.errors import InputError, RunError
from samestep.launcher.rendezvous import _connect, listen

# In one process per rank: a process joins a job once.
JOIN = """
import sys
from datetime import timedelta
from samestep.errors import SamestepError
from samestep.launcher.rendezvous import join_job
from samestep.launcher.rendezvous import listen
from samestep.distributed.launcher_detection import Rendezvous
rank, size, port, seconds = map(int, sys.argv[1:])
try:
    job = join_job(Rendezvous("Open MPI", rank, size, rank, size, "127.0.0.1", port), timedelta(seconds=seconds))
except SamestepError as error:
    print(error)
else:
    print("joined")
    job.store.set(f"left/{rank}", "")
    job.store.wait([f"left/{other}" for other in range(size)])
"""


def joiner(rank: int, size: int, port: int, seconds: int, token: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", JOIN, *map(str, (rank, size, port, seconds))]
    variables = {"SAMESTEP_TOKEN": token, "PYTHONPATH": IMPORT_PATH}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def output(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0].strip()


def test_unknown_host_is_named() -> None:
    rendezvous = Rendezvous("Slurm", 1, 2, 0, None, "no-such-host.invalid", 1234)
    for call in (lambda: listen("no-such-host.invalid", 1234), lambda: _connect(rendezvous, timedelta(seconds=1))):
        with pytest.raises(InputError, match=r"the host 'no-such-host.invalid' cannot be resolved"):
            call()


def test_unreachable_store_is_named_with_the_address() -> None:
    rendezvous = Rendezvous("torchrun", 1, 2, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(
        RunError, match=f"rank 1 of 2 cannot connect to 127.0.0.1:{rendezvous.port} within 0.2 s"
    ) as caught:
        _connect(rendezvous, timedelta(seconds=0.2))
    assert "no other machine reaches" in str(caught.value)


@pytest.mark.long
@pytest.mark.slow
def test_token_and_number_of_ranks_must_match() -> None:
    port = free_port()
    first, second = joiner(0, 2, port, 60, "ours"), joiner(1, 2, port, 60, "ours")
    assert (output(first), output(second)) == ("joined", "joined")
    port = free_port()
    ours, stranger, other = (
        joiner(0, 2, port, 6, "ours"),
        joiner(1, 2, port, 3, "theirs"),
        joiner(1, 3, port, 3, "ours"),
    )
    assert "rank 1 of 2 did not join within 6 s" in output(ours)
    assert "rank 1 of 2" in output(stranger)
    assert "rank 1 of 3" in output(other)
