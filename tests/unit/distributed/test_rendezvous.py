"""Start of a job in a store with keys of other jobs and attempts, and the port file of rank 0."""

import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from samestep.distributed.env import Environment
from samestep.distributed.rendezvous import publish_port, wait_for_port, wait_for_ranks
from samestep.errors import InputError, RunError

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)
Joined = tuple[dist.Store, int]


def joiner(
    store: dist.Store, rank: int, size: int, *, restarts: int = 0, timeout: timedelta = LONG
) -> Callable[[], Joined]:
    return lambda: wait_for_ranks(store, rank=rank, size=size, restarts=restarts, timeout=timeout, hint="look")


def run_all(joiners: list[Callable[[], Joined]]) -> list[Future[Joined]]:
    with ThreadPoolExecutor(len(joiners)) as pool:
        return [pool.submit(join) for join in joiners]


def test_single_rank() -> None:
    _, restarts = joiner(dist.HashStore(), 0, 1, restarts=2)()
    assert restarts == 2


def test_all_ranks_get_the_same_store_and_the_largest_count() -> None:
    store = dist.HashStore()
    results = [future.result() for future in run_all([joiner(store, r, 4, restarts=r % 3) for r in range(4)])]
    results[0][0].set("key", "value")
    assert [part.get("key") for part, _ in results] == [b"value"] * 4
    assert [count for _, count in results] == [2] * 4


def test_second_attempt_does_not_see_the_first() -> None:
    store = dist.HashStore()
    first = [future.result()[0] for future in run_all([joiner(store, r, 3) for r in range(3)])]
    first[0].set("key", "old")
    second = [future.result()[0] for future in run_all([joiner(store, r, 3) for r in range(3)])]
    assert not any(part.check(["key"]) for part in second)


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


def test_prefix_does_not_contain_the_token() -> None:
    assert "secret" not in Environment("secret").job_prefix
    assert len({Environment(token).job_prefix for token in ("secret", "another", None, "no-token")}) == 4


PUBLISH = """
import sys, time
from pathlib import Path
from samestep.distributed.rendezvous import publish_port
with publish_port("job", 1234, Path(sys.argv[1])):
    print("published", flush=True)
    time.sleep(60)
"""


def test_port_is_readable_while_published(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    with publish_port("slurm-1.0-0", 1234, folder):
        assert wait_for_port("slurm-1.0-0", 0, folder) == 1234
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(RunError, match="no port"):
            wait_for_port("slurm-1.1-0", 0, folder)
    assert list(folder.iterdir()) == []


def test_port_file_of_a_killed_rank_is_ignored_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISH, str(folder)], stdout=subprocess.PIPE, text=True)
    with publisher:
        assert publisher.stdout is not None
        publisher.stdout.readline()
        assert wait_for_port("job", 0, folder) == 1234
        publisher.kill()
    assert [path.name for path in folder.iterdir()] == ["job.port"]
    with pytest.raises(RunError, match=r"no port in .*job.port within 0 s") as caught:
        wait_for_port("job", 0, folder)
    assert "MASTER_PORT" in str(caught.value)
    with publish_port("job", 4321, folder):
        assert wait_for_port("job", 0, folder) == 4321


def test_job_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with publish_port("../a b/c", 1, tmp_path / "ports"):
        (path,) = (tmp_path / "ports").iterdir()
        assert path.name == ".._a_b_c.port"


def test_folder_open_to_other_users_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(InputError) as caught:
        wait_for_port("job", 0, folder)
    assert caught.value.code == "E_PORT_FOLDER"
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(InputError) as caught:
        wait_for_port("job", 0, link)
    assert caught.value.code == "E_PORT_FOLDER"
