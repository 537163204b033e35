"""Ranks on several simulated hosts: the bits of one process, and faults of hosts, network, clocks and code."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.hosts import (
    HANG_SECONDS,
    RECIPE,
    by_torchrun,
    by_variables,
    ended,
    held_run,
    hosts,
    kill_host,
    require_resumable,
    require_trained,
    single_report,
)
from helpers.surroundings import RecordFault
from helpers.system import SOURCES, TESTS, events, here, weights

SMALL = ("--exact", "epochs=1", "model.options.width=8", "metrics=[]")
TRAIN_DIGITS = ("-m", "samestep", "train", "digits", *SMALL, "--name", "many")
SCRIPT = """
from datetime import timedelta
import samestep, torch
from samestep.session import start

with start(timeout=timedelta(seconds=8)) as world:
    world.all_reduce(torch.ones(1))
    print("joined", flush=True)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    assert here("train", "digits", *SMALL, "--name", "one", cwd=path) == 0
    return weights(path / "runs/one")


@pytest.mark.parametrize(
    ("count", "ranks"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 2), (4, 1))),
    ],
)
def test_torchrun_on_several_hosts_trains_to_the_bits_of_one_process(
    count: int, ranks: int, tmp_path: Path, undisturbed: tuple[str, str]
) -> None:
    with hosts(count) as machines, ExitStack() as stack:
        results = ended(by_torchrun(machines, stack, tmp_path, *TRAIN_DIGITS, ranks=ranks), 120)
    require_trained(results, tmp_path, count * ranks, undisturbed)


@pytest.mark.long
def test_slow_link(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        for host in machines:
            host.slow("4mbit")
        results = ended(by_variables(machines, stack, tmp_path, *TRAIN_DIGITS), 120)
    require_trained(results, tmp_path, 2, undisturbed)
    fault = "the links of two hosts have 4 Mbit/s"
    record_fault(fault, "exit code 0; the same weights")


@pytest.mark.long
def test_clocks_that_differ(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    """The kernel has no wall clock per namespace: `time.time` of Python is ahead, and the kernel's monotonic clock."""
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    text = "import time\nnow = time.time\ntime.time = lambda: now() + 86400\n"
    (ahead / "sitecustomize.py").write_text(text, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        python_path = f"{ahead}:{SOURCES}"
        commands = by_variables(machines, stack, tmp_path, *TRAIN_DIGITS, python_path=python_path, clock_offset=86400)
        results = ended(commands, 120)
    require_trained(results, tmp_path, 2, undisturbed)
    fault = "the clocks of one host, monotonic and that of Python's time.time, are a day ahead"
    record_fault(fault, "exit code 0; the same weights")


@pytest.mark.long
def test_host_that_dies(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        main, lost = held_run(machines, stack, tmp_path)
        kill_host(machines[1], lost)
        (tmp_path / "hold").unlink()
        results = ended([main])
    assert results[0].code == 1, results
    report = single_report(results)
    assert "E_HANG" in report
    assert "rank 1: on host h1" in report
    require_resumable(tmp_path)
    text = "exit code 1; E_HANG names rank 1 and its host; resumed on 1: the same weights"
    record_fault("a host dies", text)


@pytest.mark.long
def test_cut_link(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run(machines, stack, tmp_path)
        machines[1].cut()
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    reports = [single_report([result]) for result in results]
    # The host of rank 1 has no connection to agree on a report.
    assert "rank 1: on host h1" in reports[0]
    assert "error: rank 0 hangs" in reports[1]
    require_resumable(tmp_path)
    text = "exit code 1 on both; E_HANG; resumed on 1: the same weights"
    record_fault("the link of a host is cut", text)


@pytest.mark.long
@pytest.mark.parametrize("dies", [True, False])
def test_torchrun_continues_on_the_other_host(dies: bool, tmp_path: Path, record_fault: RecordFault) -> None:
    """The agent restarts the ranks of the remaining host, which resume from the newest checkpoint."""
    (tmp_path / "hold").write_text("0 20", encoding="utf-8")
    train = ("-m", "samestep", "train", RECIPE, "--name", "many", "--checkpoint-every", 3)
    train += ("--hang-after", f"{HANG_SECONDS}s")
    with hosts(2) as machines, ExitStack() as stack:
        main, other = by_torchrun(machines, stack, tmp_path, *train, minimum=1, restarts=3)
        main.until(lambda: len(events(tmp_path / "runs/many", "step")) >= 6, "6 steps")
        if dies:
            kill_host(machines[1], other)
        else:
            machines[1].cut()
        (tmp_path / "hold").unlink()
        (result,) = ended([main], 120)  # the agent of the other host waits for its store
    assert result.code == 0, result
    assert here("train", RECIPE, "--name", "one", cwd=tmp_path) == 0
    assert weights(tmp_path / "runs/many") == weights(tmp_path / "runs/one")
    fault = "a host of torchrun dies" if dies else "the link of a host of torchrun is cut"
    record_fault(f"{fault}, `--nnodes=1:2 --max-restarts`", "exit code 0; the same weights")


@pytest.mark.long
def test_wrong_token(tmp_path: Path, record_fault: RecordFault) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        commands = by_variables(machines, stack, tmp_path, "script.py", token="other")
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    assert all("E_RENDEZVOUS" in result.err and "joined" not in result.out for result in results), results
    assert "rank 1 of 2 did not join" in results[0].err
    record_fault("a host has another SAMESTEP_TOKEN", "exit code 1 on both; E_RENDEZVOUS names rank 1")


@pytest.mark.long
def test_other_user_code(tmp_path: Path, record_fault: RecordFault) -> None:
    shutil.copytree(TESTS / "helpers", tmp_path / "tests/helpers")
    with (tmp_path / "tests/helpers/recorded.py").open("a", encoding="utf-8") as file:
        file.write("# another revision\n")
    with hosts(2) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many")
        python_path = f"{SOURCES}:{tmp_path / 'tests'}"
        results = ended(by_variables(machines, stack, tmp_path, *command, python_path=python_path))
    assert [result.code for result in results] == [2, 2], results
    report = single_report(results)
    assert all(name in report for name in ("E_CODE_CHANGED", "rank 1 on host h1", "helpers.recorded")), report
    assert not events(tmp_path / "runs/many", "step")
    observed = "exit code 2 on both; E_CODE_CHANGED names rank 1 on host h1 and the module"
    record_fault("a host has other modules of the user", observed)
