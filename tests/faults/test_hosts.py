"""Ranks on several simulated hosts: the bits of one process, and faults of hosts, network, clocks and software."""

import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import run

import pytest
import torch

from helpers.hosts import (
    END_SECONDS,
    HANG_SECONDS,
    PORT,
    RECIPE,
    STARTS,
    by_hosts,
    by_torchrun,
    by_variables,
    command_of,
    ended,
    held_run,
    hosts,
    kill_host,
    listed,
    name_of,
    named,
    require_resumable,
    require_trained,
    same_report,
    single_report,
)
from helpers.surroundings import RecordFault
from helpers.system import SOURCES, TESTS, events, here, until, weights

SMALL = ("--set", "epochs=1", "--set", "model.options.width=8", "--set", "metrics=[]")
TRAIN_DIGITS = ("-m", "samestep", "train", "digits", *SMALL, "--name", "many")
SCRIPT = """
from datetime import timedelta
import samestep, torch

with samestep.start(timeout=timedelta(seconds=8)) as world:
    world.all_reduce(torch.ones(1))
    print("joined", flush=True)
"""

PLACE_SCRIPT = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
pairs = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"))
print(*(f"{os.environ[number]}/{os.environ[size]}" for number, size in pairs), sys.argv[1:], total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    assert here("train", "digits", *SMALL, "--name", "one", cwd=path) == 0
    return weights(path / "runs/one")


WAYS = pytest.mark.parametrize("way", STARTS)


HOSTS_AND_RANKS = pytest.mark.parametrize(
    ("count", "ranks"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 2), (4, 1))),
    ],
)


@HOSTS_AND_RANKS
def test_torchrun_on_several_hosts_trains_to_the_bits_of_one_process(
    count: int, ranks: int, tmp_path: Path, undisturbed: tuple[str, str]
) -> None:
    with hosts(count) as machines, ExitStack() as stack:
        results = ended(by_torchrun(machines, stack, tmp_path, *TRAIN_DIGITS, ranks=ranks), 120)
    require_trained(results, tmp_path, count * ranks, undisturbed)


@HOSTS_AND_RANKS
def test_samestep_on_several_hosts_trains_to_the_bits_of_one_process(
    count: int, ranks: int, tmp_path: Path, undisturbed: tuple[str, str]
) -> None:
    with hosts(count) as machines, ExitStack() as stack:
        commands = by_hosts(machines, stack, tmp_path, *TRAIN_DIGITS, "--processes", ranks)
        results = ended(commands, 120)
    require_trained(results, tmp_path, count * ranks, undisturbed)
    assert [bool(result.out) for result in results] == [True, *[False] * (count - 1)], results


@pytest.mark.long
def test_script_on_several_hosts(tmp_path: Path) -> None:
    """Two ranks on one host and one on the other; a script finds the variables of torchrun."""
    (tmp_path / "script.py").write_text(PLACE_SCRIPT, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        commands = [
            stack.enter_context(
                host.run(
                    *(sys.executable, "-m", "samestep", "run", "--processes", 2 - number),
                    *(*listed(machines, number), "script.py", "argument"),
                    cwd=tmp_path,
                )
            )
            for number, host in enumerate(machines)
        ]
        results = ended(commands, 60)
    assert [result.code for result in results] == [0, 0], results
    logs = sorted(tmp_path.glob("runs/*/logs/rank-*.log"))
    texts = [results[0].out, *(log.read_text(encoding="utf-8") for log in logs)]
    assert texts == [f"{place} ['argument'] 6.0\n" for place in ("0/3 0/2 0/2", "1/3 1/2 0/2", "2/3 0/1 1/2")], texts


@pytest.mark.long
@WAYS
def test_slow_link(way: str, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        for host in machines:
            host.slow("4mbit")
        results = ended(STARTS[way](machines, stack, tmp_path, *TRAIN_DIGITS), 120)
    require_trained(results, tmp_path, 2, undisturbed)
    fault = named("the links of two hosts have 4 Mbit/s", way)
    record_fault(fault, "the same weights", "exit code 0; the same weights")


@pytest.mark.long
@WAYS
def test_clocks_that_differ(way: str, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    """The kernel has no wall clock per namespace: `time.time` of Python is ahead, and the kernel's monotonic clock."""
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    text = "import time\nnow = time.time\ntime.time = lambda: now() + 86400\n"
    (ahead / "sitecustomize.py").write_text(text, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        python_path = f"{ahead}:{SOURCES}"
        commands = STARTS[way](machines, stack, tmp_path, *TRAIN_DIGITS, python_path=python_path, clock_offset=86400)
        results = ended(commands, 120)
    require_trained(results, tmp_path, 2, undisturbed)
    fault = named("the clocks of one host, monotonic and that of Python's time.time, are a day ahead", way)
    record_fault(fault, "the same weights", "exit code 0; the same weights")


@pytest.mark.long
@WAYS
def test_host_that_dies(way: str, tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        main, lost = held_run(way, machines, stack, tmp_path)
        kill_host(machines[1], lost)
        (tmp_path / "hold").unlink()
        results = ended([main])
    assert results[0].code == 1, results
    report = single_report(results)
    observed = "E_HOST_LOST" if way == "--hosts" else "E_HANG"
    lost_host = [f"host {machines[1].address} is lost", "rank 1: on this host"]
    names = lost_host if way == "--hosts" else ["rank 1: on host h1"]
    assert all(name in report for name in (*names, observed)), report
    require_resumable(tmp_path)
    expected = "the other ranks end, and name host and rank; resumed to the same weights"
    text = f"exit code 1; {observed} names rank 1 and its host; resumed on 1: the same weights"
    record_fault(named("a host dies", way), expected, text)


@pytest.mark.long
@WAYS
def test_cut_link(way: str, tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run(way, machines, stack, tmp_path)
        machines[1].cut()
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    reports = [single_report([result]) for result in results]
    # The host of rank 1 has no connection to agree on a report.
    names, observed = ("rank 1: on host h1", "error: rank 0 hangs"), "E_HANG"
    if way == "--hosts":
        names = (f"host {machines[1].address} is lost", f"host {machines[0].address} is lost")
        observed = "E_HOST_LOST names the other host"
    assert all(name in report for name, report in zip(names, reports, strict=True)), reports
    require_resumable(tmp_path)
    expected = "all ranks end, with one report per host; resumed to the same weights"
    text = f"exit code 1 on both; {observed}; resumed on 1: the same weights"
    record_fault(named("the link of a host is cut", way), expected, text)


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
    expected = "torchrun restarts the other host's ranks, which resume to the same weights"
    record_fault(f"{fault}, `--nnodes=1:2 --max-restarts`", expected, "exit code 0; the same weights")


@pytest.mark.long
def test_wrong_token(tmp_path: Path, record_fault: RecordFault) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        commands = by_variables(machines, stack, tmp_path, "script.py", token="other")
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    assert all("E_RENDEZVOUS" in result.err and "joined" not in result.out for result in results), results
    assert "rank 1 of 2 did not join" in results[0].err
    expected = "not admitted; all ranks end within the time limit, and name the missing rank"
    record_fault("a host has another SAMESTEP_TOKEN", expected, "exit code 1 on both; E_RENDEZVOUS names rank 1")


@pytest.mark.long
def test_host_with_a_wrong_token(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many", "--hang-after", f"{HANG_SECONDS}s")
        results = ended(by_hosts(machines, stack, tmp_path, *command, token="other"))
    assert [result.code for result in results] == [1, 2], results
    first, second = (single_report([result]) for result in results)
    assert "E_RENDEZVOUS" in first
    assert all(
        text in first for text in (f"host {machines[1].address} did not arrive", "it has another SAMESTEP_TOKEN")
    )
    assert "E_HOSTS" in second
    assert "it has another SAMESTEP_TOKEN" in second
    assert not (tmp_path / "runs").exists()
    observed = "exit code 1 and 2; E_RENDEZVOUS and E_HOSTS name the host and the token"
    fault = named("a host has another SAMESTEP_TOKEN", "--hosts")
    record_fault(fault, "refused before training, by name; the first host waits for the right one", observed)


@pytest.mark.long
def test_host_that_does_not_arrive(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(3) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many", "--hang-after", f"{HANG_SECONDS}s")
        results = ended(by_hosts(machines, stack, tmp_path, *command, without=1))
    assert [result.code for result in results] == [1, 1], results
    report = same_report(results)
    assert "E_RENDEZVOUS" in report
    assert (
        f"host {machines[1].address} did not arrive at {machines[0].address}:{PORT} within {HANG_SECONDS} s" in report
    )
    expected = "the hosts that have arrived end within the time limit, and name the missing one"
    record_fault(named("a host does not arrive", "--hosts"), expected, "exit code 1 on both; E_RENDEZVOUS")


@pytest.mark.long
def test_stop_request_on_one_host(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run("--hosts", machines, stack, tmp_path)
        commands[1].kill_process(command_of(commands[1]), signal.SIGTERM)
        time.sleep(1)
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert [result.code for result in results] == [130, 130], results
    assert not any("error: " in result.err for result in results), results
    require_resumable(tmp_path)
    expected = "all hosts stop after the step, with a checkpoint; resumed to the same weights"
    fault = named("SIGTERM to the command of one host", "--hosts")
    record_fault(fault, expected, "exit code 130 on both; resumed on 1: the same weights")


@pytest.mark.long
def test_stop_request_before_all_hosts_have_arrived(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(3) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many")
        commands = by_hosts(machines, stack, tmp_path, *command, without=1)
        address = f"{machines[0].address}:{PORT}"
        joined = ["ip", "netns", "exec", machines[0].namespace, "ss", "-Htn", "state", "established", "src", address]
        until(lambda: run(joined, capture_output=True, check=True).stdout, "host 2 has arrived", END_SECONDS)
        commands[1].kill_process(command_of(commands[1]), signal.SIGTERM)
        results = ended(commands, 5)
    assert [result.code for result in results] == [130, 130], results
    assert all("E_STOPPED" in single_report([result]) for result in results), results
    assert not (tmp_path / "runs").exists()
    expected = "all hosts that have arrived stop at once"
    fault = named("SIGTERM to the command of one host, before all hosts have arrived", "--hosts")
    record_fault(fault, expected, "exit code 130 on both")


@pytest.mark.long
def test_killed_rank_of_one_host(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run("--hosts", machines, stack, tmp_path)
        (process,) = (process for process in commands[1].processes() if name_of(process) == "samestep-1")
        commands[1].kill_process(process, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    report = same_report(results)
    assert "rank 1 was killed by SIGKILL" in report
    assert f"host:     {machines[1].address}" in report
    require_resumable(tmp_path)
    expected = "all hosts end, with the same report; resumed to the same weights"
    fault = named("a rank of one host is killed", "--hosts")
    observed = "exit code 1 on both; E_RANK_KILLED names rank and host; resumed on 1: the same weights"
    record_fault(fault, expected, observed)


@pytest.mark.long
def test_exception_on_one_host(tmp_path: Path, record_fault: RecordFault) -> None:
    failing = ("loss.name=helpers.recorded:failing", "loss.options.rank=1", "loss.options.call=20")
    with hosts(2) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--set", *failing, "--name", "many")
        results = ended(by_hosts(machines, stack, tmp_path, *command))
    assert [result.code for result in results] == [1, 1], results
    report = same_report(results)
    assert "rank 1 failed in engine.step" in report
    assert "the sum does not add up" in report
    assert f"host:     {machines[1].address}" in report
    fault, expected = named("a rank of one host raises", "--hosts"), "all hosts end, with the same report"
    record_fault(fault, expected, "exit code 1 on both; the traceback, rank and host")


@pytest.mark.long
def test_killed_launcher_of_one_host(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run("--hosts", machines, stack, tmp_path)
        commands[1].kill_process(command_of(commands[1]), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert results[0].code == 1, results
    report = single_report(results[:1])
    assert f"host {machines[1].address} is lost: its command has ended [E_HOST_LOST]" in report
    require_resumable(tmp_path)
    expected = "the ranks of all hosts end within 10 s; resumed to the same weights"
    fault = named("the command of one host is killed", "--hosts")
    record_fault(fault, expected, "exit code 1; E_HOST_LOST names the host; resumed on 1: the same weights")


def require_refused(way: str, path: Path, python_path: str, code: str, *names: str) -> None:
    """Require that a run with another import path on host h1 ends before training, with one report."""
    with hosts(2) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many")
        results = ended(STARTS[way](machines, stack, path, *command, python_path=python_path))
    assert [result.code for result in results] == [2, 2], results
    report = same_report(results) if way == "--hosts" else single_report(results)
    assert all(name in report for name in (code, "rank 1 on host h1", *names)), report
    assert not events(path / "runs/many", "step")


@pytest.mark.long
@WAYS
def test_other_torch_version(way: str, tmp_path: Path, record_fault: RecordFault) -> None:
    """A package torch with another file of its version; all other files are those of the installed package."""
    installed, other = Path(torch.__file__).parent, tmp_path / "other" / "torch"
    other.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name != "version.py":
            (other / path.name).symlink_to(path)
    text = (installed / "version.py").read_text(encoding="utf-8")
    assert torch.__version__ in text
    (other / "version.py").write_text(text.replace(str(torch.__version__), "2.9.1+other"), encoding="utf-8")
    require_refused(
        way, tmp_path, f"{other.parent}:{SOURCES}:{TESTS}", "E_SOFTWARE_DIFFERS", "torch 2.9.1+other", torch.__version__
    )
    observed = "exit code 2 on both; E_SOFTWARE_DIFFERS names rank 1 on host h1 and both versions"
    record_fault(named("a host has another version of torch", way), "refused before training, by name", observed)


@pytest.mark.long
@WAYS
def test_other_version_of_samestep(way: str, tmp_path: Path, record_fault: RecordFault) -> None:
    shutil.copytree(SOURCES, tmp_path / "src")
    with (tmp_path / "src/samestep/engine/engine.py").open("a", encoding="utf-8") as file:
        file.write("# another revision\n")
    require_refused(way, tmp_path, f"{tmp_path / 'src'}:{TESTS}", "E_SOFTWARE_DIFFERS", "Samestep source")
    observed = "exit code 2 on both; E_SOFTWARE_DIFFERS names rank 1 on host h1"
    record_fault(named("a host has another revision of Samestep", way), "refused before training, by name", observed)


@pytest.mark.long
@WAYS
def test_other_user_code(way: str, tmp_path: Path, record_fault: RecordFault) -> None:
    shutil.copytree(TESTS / "helpers", tmp_path / "tests/helpers")
    with (tmp_path / "tests/helpers/recorded.py").open("a", encoding="utf-8") as file:
        file.write("# another revision\n")
    require_refused(way, tmp_path, f"{SOURCES}:{tmp_path / 'tests'}", "E_CODE_CHANGED", "helpers.recorded")
    observed = "exit code 2 on both; E_CODE_CHANGED names rank 1 on host h1 and the module"
    record_fault(named("a host has other modules of the user", way), "refused before training, by name", observed)
