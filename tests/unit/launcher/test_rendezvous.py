"""Rendezvous of ranks in a store: addresses, tokens, attempts, missing ranks."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from helpers.started import free_port
from helpers.system import IMPORT_PATH
from samestep.distributed.env import Environment
from samestep.distributed.launcher_variables import RankPlace
from samestep.errors import InputError, RunError
from samestep.launcher.rendezvous import _connect, listen, wait_for_ranks

# In one process per rank: a process joins a job once.
JOIN = """
import sys
from datetime import timedelta
from samestep.errors import SamestepError
from samestep.launcher.rendezvous import join_job
from samestep.launcher.rendezvous import listen
from samestep.distributed.launcher_variables import RankPlace
rank, size, port, seconds = map(int, sys.argv[1:])
try:
    job = join_job(RankPlace("Slurm", rank, size, rank, size, "127.0.0.1", port), timedelta(seconds=seconds))
except SamestepError as error:
    print(error)
else:
    print("joined")
    job.store.set(f"left/{rank}", "")
    job.store.wait([f"left/{other}" for other in range(size)])
"""


def joining_process(rank: int, size: int, port: int, seconds: int, token: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", JOIN, *map(str, (rank, size, port, seconds))]
    variables = {"SAMESTEP_TOKEN": token, "PYTHONPATH": IMPORT_PATH}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def output(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0].strip()


def test_unknown_host_is_named() -> None:
    rank_place = RankPlace("Slurm", 1, 2, 0, None, "no-such-host.invalid", 1234)
    for call in (lambda: listen("no-such-host.invalid", 1234), lambda: _connect(rank_place, timedelta(seconds=1))):
        with pytest.raises(InputError, match=r"the host 'no-such-host.invalid' cannot be resolved"):
            call()


def test_unreachable_store_is_named_with_the_address() -> None:
    rank_place = RankPlace("torchrun", 1, 2, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(
        RunError, match=f"rank 1 of 2 cannot connect to 127.0.0.1:{rank_place.port} within 0.2 s"
    ) as caught:
        _connect(rank_place, timedelta(seconds=0.2))
    assert "no other machine reaches" in str(caught.value)


@pytest.mark.long
@pytest.mark.slow
def test_token_and_number_of_ranks_must_match() -> None:
    port = free_port()
    first, second = joining_process(0, 2, port, 60, "ours"), joining_process(1, 2, port, 60, "ours")
    assert (output(first), output(second)) == ("joined", "joined")
    port = free_port()
    ours, stranger, other = (
        joining_process(0, 2, port, 6, "ours"),
        joining_process(1, 2, port, 3, "theirs"),
        joining_process(1, 3, port, 3, "ours"),
    )
    assert "rank 1 of 2 did not join within 6 s" in output(ours)
    assert "rank 1 of 2" in output(stranger)
    assert "rank 1 of 3" in output(other)


def test_rank_0listens_on_its_address_only() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_address_of_another_machine_means_all_interfaces() -> None:
    with listen("192.0.2.77", 0) as listener:  # RFC 5737: reserved for documentation
        assert listener.getsockname()[0] == "0.0.0.0"


def test_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} at 127.0.0.1 is used") as caught:
            listen("127.0.0.1", port)
    assert "MASTER_PORT" in str(caught.value)


LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)
Joined = tuple[dist.Store, int]


def joiner(
    store: dist.Store, rank: int, size: int, *, restarts: int = 0, timeout: timedelta = LONG
) -> Callable[[], Joined]:
    return lambda: wait_for_ranks(store, rank=rank, size=size, restarts=restarts, timeout=timeout, hint="look")


def run_all(joiners: list[Callable[[], Joined]]) -> list[Future[Joined]]:
    with ThreadPoolExecutor(len(joiners)) as pool:
        return [pool.submit(join) for join in joiners]


def test_all_ranks_get_the_same_store_and_the_largest_count() -> None:
    store = dist.HashStore()
    results = [future.result() for future in run_all([joiner(store, r, 4, restarts=r % 3) for r in range(4)])]
    results[0][0].set("key", "value")
    assert [part.get("key") for part, _ in results] == [b"value"] * 4
    assert [count for _, count in results] == [2] * 4


def test_keys_of_a_rank_of_an_earlier_attempt_do_not_count() -> None:
    store = dist.HashStore()
    with pytest.raises(RunError, match=r"rank 1 of 2 received no answer from rank 0 within 0\.3 s"):
        joiner(store, 1, 2, timeout=SHORT)()  # posts a nonce and ends
    with pytest.raises(RunError, match=r"rank 1 of 2 did not join within 0\.3 s"):
        joiner(store, 0, 2, timeout=SHORT)()
    assert [future.result()[1] for future in run_all([joiner(store, r, 2) for r in range(2)])] == [0, 0]


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    rank_0, rank_2 = run_all([joiner(store, rank, 4, timeout=SHORT) for rank in (0, 2)])
    with pytest.raises(RunError, match="ranks 1 and 3 of 4 did not join") as caught:
        rank_0.result()
    assert (caught.value.code, caught.value.fix) == ("E_RENDEZVOUS", "look")
    with pytest.raises(RunError, match="rank 2 of 4 received no answer"):
        rank_2.result()


def test_another_token_or_number_of_ranks_is_invisible() -> None:
    store = dist.HashStore()
    ours, theirs = (dist.PrefixStore(Environment(token).job_prefix, store) for token in ("ours", "theirs"))
    ranks = [joiner(ours, 0, 2), joiner(ours, 1, 2)]
    strangers = [joiner(theirs, 1, 2, timeout=SHORT), joiner(ours, 1, 3, timeout=SHORT)]
    first, second, *others = run_all([*ranks, *strangers])
    assert first.result()[1] == second.result()[1] == 0
    for other in others:
        with pytest.raises(RunError, match="rank 1 of"):
            other.result()
