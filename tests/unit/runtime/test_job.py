"""Where rank 0 of a job that another launcher started listens, and who reaches it."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from samestep.errors import InputError, RunError
from samestep.runtime.job import _connected, _listener
from samestep.runtime.rendezvous import Rendezvous
from started import free_port

# Each in a process of its own: a process joins once.
JOIN = """
import sys
from datetime import timedelta
from samestep.errors import SamestepError
from samestep.runtime.job import join_job
from samestep.runtime.rendezvous import Rendezvous
rank, size, port, seconds = map(int, sys.argv[1:])
try:
    job = join_job(Rendezvous("MPI", rank, size, rank, size, "127.0.0.1", port), timedelta(seconds=seconds))
except SamestepError as error:
    print(error)
else:
    print("joined", job.is_store_there())
    job.store.set(f"left/{rank}", "")
    job.store.wait([f"left/{other}" for other in range(size)])
"""


def joiner(rank: int, size: int, port: int, seconds: int, token: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", JOIN, *map(str, (rank, size, port, seconds))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"SAMESTEP_TOKEN": token})


def said(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0].strip()


def test_rank_0_listens_on_its_address_alone() -> None:
    with _listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_machine_means_all_of_this_ones() -> None:
    with _listener("192.0.2.77", 0) as listener:  # RFC 5737: an address that no machine has
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_name_that_means_this_machine_alone_here_may_mean_more_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: known)
    with _listener("this-host", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_named() -> None:
    with _listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} at 127.0.0.1 is taken") as caught:
            _listener("127.0.0.1", port)
    assert "MASTER_PORT" in str(caught.value)


def test_a_host_that_nobody_knows_is_named() -> None:
    found = Rendezvous("Slurm", 1, 2, 0, None, "no-such-host.invalid", 1234)
    for ask in (lambda: _listener("no-such-host.invalid", 1234), lambda: _connected(found, timedelta(seconds=1))):
        with pytest.raises(InputError, match=r"the host 'no-such-host.invalid' cannot be found"):
            ask()


def test_nobody_there_is_told_with_the_address() -> None:
    found = Rendezvous("torchrun", 1, 2, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(RunError, match=f"rank 1 of 2 reached nobody at 127.0.0.1:{found.port} within 0.2 s") as caught:
        _connected(found, timedelta(seconds=0.2))
    assert "no other machine reaches" in str(caught.value)


@pytest.mark.slow
def test_only_who_has_the_token_and_the_number_of_ranks_is_counted_in() -> None:
    port = free_port()
    first, second = joiner(0, 2, port, 60, "ours"), joiner(1, 2, port, 60, "ours")
    assert (said(first), said(second)) == ("joined True", "joined True")
    port = free_port()
    ours, stranger, other = (
        joiner(0, 2, port, 6, "ours"),
        joiner(1, 2, port, 3, "theirs"),
        joiner(1, 3, port, 3, "ours"),
    )
    assert "rank 1 of 2 did not come within 6 s" in said(ours)
    assert "rank 1 of 2" in said(stranger)
    assert "rank 1 of 3" in said(other)
