"""Jobs of other launchers: the address of the store, and connections of ranks."""

import socket
import subprocess
import sys
from datetime import timedelta

import pytest

from helpers.started import free_port
from samestep.distributed.launcher_detection import Rendezvous
from samestep.errors import InputError, RunError
from samestep.launcher.job import _connect, _listen

# In one process per rank: a process joins a job once.
JOIN = """
import sys
from datetime import timedelta
from samestep.errors import SamestepError
from samestep.launcher.job import join_job
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
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"SAMESTEP_TOKEN": token})


def output(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0].strip()


def test_rank_0_listens_on_its_address_only() -> None:
    with _listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_means_all_interfaces() -> None:
    with _listen("192.0.2.77", 0) as listener:  # RFC 5737: reserved for documentation
        assert listener.getsockname()[0] == "0.0.0.0"


def test_host_name_with_a_loopback_address_means_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: results)
    with _listen("this-host", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_port_in_use_is_named() -> None:
    with _listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} at 127.0.0.1 is used") as caught:
            _listen("127.0.0.1", port)
    assert "MASTER_PORT" in str(caught.value)


def test_unknown_host_is_named() -> None:
    rendezvous = Rendezvous("Slurm", 1, 2, 0, None, "no-such-host.invalid", 1234)
    for call in (lambda: _listen("no-such-host.invalid", 1234), lambda: _connect(rendezvous, timedelta(seconds=1))):
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
