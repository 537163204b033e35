"""Launchers of several hosts: arrival, places, refusals, shared values, stops, and lost hosts.

Each launcher is a thread; where a launcher receives a signal, each is a process.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from helpers.started import free_port
from helpers.system import IMPORT_PATH, Running
from samestep.distributed.status import StatusBoard
from samestep.errors import InputError, RunError
from samestep.launcher.failure import Failure, RankError, StoppedError
from samestep.launcher.host_arrival import _PROTOCOL, join_hosts
from samestep.launcher.host_workers import HostWorkerGroup
from samestep.launcher.hosts import (
    BEAT_SECONDS,
    HostGroup,
    HostsConfig,
    Link,
    Place,
    failure_from,
    failure_values,
    silence_limit,
)
from samestep.launcher.worker_group import LaunchConfig

HOSTS = ("127.0.0.1", "second", "third")
LIMIT = 20.0
SHORT = 1.0
Use = Callable[[HostGroup], Any]
VARIABLES = {"PYTHONPATH": IMPORT_PATH}
LAUNCHER = """
import sys, time
from pathlib import Path

from samestep.errors import SamestepError
from samestep.launcher.host_arrival import join_hosts
from samestep.launcher.hosts import HostsConfig
from samestep.launcher.launch import LaunchConfig, run_workers

rank, port = map(int, sys.argv[1:])
try:
    with join_hosts(HostsConfig(("127.0.0.1", "second", "third"), rank, port), 1, 60.0) as group:
        Path(f"arrived-{rank}").touch()
        while group.is_first and not Path("planned").exists():
            time.sleep(0.02)
        group.share()
        run_workers(time.sleep, 60, processes=1, launch_config=LaunchConfig(60.0, hosts=group))
except SamestepError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def place_of(group: HostGroup) -> Place:
    return group.place


def on_hosts(
    *ranks: int, use: Use = place_of, limit: float = LIMIT, hosts: tuple[str, ...] = HOSTS, port: int | None = None
) -> list["Future[Any]"]:
    """Run `use` with the group of each host in a thread, with one rank more on each host; return the results."""
    port = port or free_port()

    def run(rank: int) -> Any:
        with join_hosts(HostsConfig(hosts, rank, port), rank + 1, limit) as group:
            return use(group)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(run, rank) for rank in ranks]


def test_ranks_are_numbered_host_by_host() -> None:
    places = [future.result() for future in on_hosts(0, 1, 2)]
    assert [(place.first_rank, place.size, place.counts) for place in places] == [
        (0, 6, (1, 2, 3)),
        (1, 6, (1, 2, 3)),
        (3, 6, (1, 2, 3)),
    ]
    assert len({place.port for place in places}) == 1
    assert [place.address for place in places] == [HOSTS[0]] * 3
    assert [places[0].host_of(rank) for rank in range(6)] == [0, 1, 1, 2, 2, 2]
    assert all(place.interface in ("lo", "lo0") for place in places)


def test_first_host_shares_a_value_and_its_exit_code() -> None:
    def use(group: HostGroup) -> tuple[Any, int]:
        return group.share("plan" if group.is_first else None), group.agree_on_exit(3 if group.is_first else 0)

    assert [future.result() for future in on_hosts(0, 1, 2, use=use)] == [("plan", 3)] * 3


def test_failure_of_the_first_host_is_that_of_all() -> None:
    def use(group: HostGroup) -> None:
        if group.is_first:
            raise InputError("the recipe is invalid", expected="a valid one", fix="change it", code="E_VALUE")
        group.share()

    first, *others = on_hosts(0, 1, 2, use=use)
    with pytest.raises(InputError):
        first.result()
    for other in others:
        with pytest.raises(RankError, match="the recipe is invalid") as caught:
            other.result()
        assert (caught.value.code, caught.value.exit_code) == ("E_VALUE", 2)


@pytest.mark.parametrize("stopped", [0, 1, 2])
@pytest.mark.parametrize("kind", [StoppedError, KeyboardInterrupt])
def test_host_that_is_stopped_before_its_ranks_start_stops_all(stopped: int, kind: type[BaseException]) -> None:
    def use(group: HostGroup) -> None:
        group.share()
        if group.config.rank == stopped:
            raise kind("stopped")
        with closing(StatusBoard.create(group.place.size)) as board:
            HostWorkerGroup(board, LaunchConfig(LIMIT, hosts=group), group).wait_for_all()

    for rank, future in enumerate(on_hosts(0, 1, 2, use=use)):
        with pytest.raises(kind if rank == stopped else StoppedError):
            future.result()


@pytest.mark.slow
@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_signal_while_the_first_host_plans_stops_all(stopped: int, number: signal.Signals, tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                Running(LAUNCHER, rank, port, cwd=tmp_path, command=(sys.executable, "-c"), variables=VARIABLES)
            )
            for rank in range(3)
        ]
        for rank, launcher in enumerate(launchers):
            launcher.until((tmp_path / f"arrived-{rank}").exists, "the arrival of all hosts")
        launchers[stopped].kill(number)
        results = {stopped: launchers[stopped].wait(LIMIT)}
        (tmp_path / "planned").touch()
        # Each imports torch for its fork server.
        results |= {rank: launcher.wait(90) for rank, launcher in enumerate(launchers) if rank != stopped}
    assert [result.code for result in results.values()] == [130] * 3, results
    assert all(result.err.count("E_STOPPED") == 1 for result in results.values()), results
    assert not any("stopping; press Ctrl-C" in result.err for result in results.values()), results
    assert f"stopped by {number.name} while no ranks were running" in results[stopped].err


def test_silence_limit_is_half_of_the_limit_of_hangs_within_bounds() -> None:
    assert [silence_limit(limit) for limit in (1.0, 20.0, 600.0)] == [3 * BEAT_SECONDS, 10.0, 60.0]


def test_missing_hosts_are_named_on_the_hosts_that_have_arrived() -> None:
    first, second = on_hosts(0, 1, limit=SHORT)
    with pytest.raises(RunError, match=r"host third did not arrive at 127\.0\.0\.1:") as caught:
        first.result()
    assert caught.value.code == "E_RENDEZVOUS"
    with pytest.raises(RankError, match="host third did not arrive"):
        second.result()


def test_missing_first_host_is_named() -> None:
    (second,) = on_hosts(1, limit=SHORT)
    with pytest.raises(RunError, match=r"the first host, 127.0.0.1:\d+, has admitted no host within 1 s"):
        second.result()


def connected(port: int) -> socket.socket:
    """Return a connection to a first host that is about to listen."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((HOSTS[0], port), timeout=LIMIT)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def answer(data: bytes) -> Any:
    """Return the first answer of a first host to a connection, None without one; two proper hosts arrive later."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(on_hosts, 0, hosts=HOSTS[:2], port=port)
        with connected(port) as connection, connection.makefile("rb") as file:
            connection.sendall(data)
            line = file.readline()
        (second,) = on_hosts(1, hosts=HOSTS[:2], port=port)
        assert first.result()[0].result().size == second.result().size == 3
    return json.loads(line) if line else None


def refusal(**changes: Any) -> Any:
    """Return the reason for which a first host refuses a hello with these changes."""
    hello = {"protocol": _PROTOCOL, "token": "samestep/no-token", "hosts": HOSTS[:2], "host": 1, "processes": 1}
    kind, reason = answer(json.dumps(["hello", {**hello, **changes}]).encode() + b"\n")
    assert kind == "refused"
    return reason


@pytest.mark.skipif("SAMESTEP_TOKEN" in os.environ, reason="the test has no token")
def test_other_commands_are_refused_by_name() -> None:
    assert refusal(token="samestep/other") == "it has another SAMESTEP_TOKEN"
    assert refusal(hosts=["second"]) == "it has --hosts second, the first host 127.0.0.1,second"
    assert refusal(host=0) == "--host-rank 0 has arrived already"
    assert refusal(protocol="samestep-hosts-0") == "it runs another version of Samestep"


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"5\n", b"[" * 60_000 + b"\n", b'["hello", {}]\n', b'["hello", {"host": "1"}]\n'],
    ids=["HTTP", "number", "brackets", "empty hello", "incomplete hello"],
)
def test_connection_without_a_hello_is_ignored(data: bytes) -> None:
    assert answer(data) is None


def test_port_of_another_program_is_not_the_first_host() -> None:
    with socket.create_server((HOSTS[0], 0)) as listener, ThreadPoolExecutor(1) as pool:
        second = pool.submit(on_hosts, 1, limit=SHORT, port=listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            with pytest.raises(RunError, match="has admitted no host within 1 s"):
                second.result()[0].result()


def test_silent_host_is_lost() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        group = HostGroup(HostsConfig(HOSTS, 0, 1), Place((1, 2, 1), 0, "", 1), {1: Link(ours, 1)}, lost_after=0.2)
        assert group.lost_hosts() == {}
        theirs.sendall(b"\n")
        assert list(group.links[1].messages()) == []
        time.sleep(0.15)
        assert group.lost_hosts() == {}
        time.sleep(0.25)
        assert "has not answered" in group.lost_hosts()[1]
    assert list(group.links[1].messages()) == []
    assert group.lost_hosts() == {1: "its command has ended"}
    failure = group.lost_failure(1, "its command has ended")
    assert (failure.rank, failure.code, failure.exit_code) == (1, "E_HOST_LOST", 1)
    assert "ranks 1 and 2: on this host" in failure.text
    group.links[1].close()


def test_failure_of_another_host_keeps_its_age() -> None:
    failure = Failure(3, time.monotonic() - 5, "error: failed", 1, by_signal=9)
    received = failure_from(json.loads(json.dumps(failure_values(failure))))
    assert abs(received.when - failure.when) < 1
    assert (received.rank, received.text, received.by_signal) == (3, "error: failed", 9)


@pytest.mark.parametrize(
    ("hosts", "rank", "port"),
    [(("a", "a"), 0, 1), (("a", ""), 0, 1), (("a", "b"), 2, 1), (("a",), -1, 1), (("a",), 0, 0)],
)
def test_invalid_lists_are_refused(hosts: tuple[str, ...], rank: int, port: int) -> None:
    with pytest.raises(InputError) as caught:
        HostsConfig(hosts, rank, port)
    assert caught.value.code == "E_HOSTS"
