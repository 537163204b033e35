"""Ranks on several simulated hosts: the bits of one process, and faults of hosts, network, clocks and software."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from helpers.hosts import SOURCES, Host, by_hand, hosts, torchrun
from helpers.surroundings import RecordFault, require_bounded
from helpers.system import TESTS, Done, Running, events, here, until, weights

RECIPE = TESTS / "helpers/recorded.yaml"
SMALL = ("--set", "epochs=1", "--set", "model.options.width=8", "--set", "metrics=[]")
TRAIN_DIGITS = ("-m", "samestep", "train", "digits", *SMALL, "--name", "many")
HANG_SECONDS = 8
END_SECONDS = 40  # limit of hangs, reports of silent ranks, and the end of torchrun
SCRIPT = """
from datetime import timedelta
import samestep, torch

with samestep.start(timeout=timedelta(seconds=8)) as world:
    world.all_reduce(torch.ones(1))
    print("joined", flush=True)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    assert here("train", "digits", *SMALL, "--name", "one", cwd=path) == 0
    return weights(path / "runs/one")


def train_on(machines: Sequence[Host], stack: ExitStack, path: Path, ranks: int) -> list[Running]:
    """Start torchrun with the recipe digits on each host; the folder of runs is common to the hosts."""
    return [
        stack.enter_context(host.run(*torchrun(machines, number, ranks), *TRAIN_DIGITS, cwd=path))
        for number, host in enumerate(machines)
    ]


def by_variables(
    machines: Sequence[Host],
    stack: ExitStack,
    path: Path,
    *command: object,
    python_path: str = f"{SOURCES}:{TESTS}",
    token: str = "token",
    clock_offset: int = 0,
) -> list[Running]:
    """Start one rank per host by variables alone, without an agent; path, token and clocks are those of other hosts."""
    commands = []
    for number, host in enumerate(machines):
        own = {"PYTHONPATH": python_path, "SAMESTEP_TOKEN": token} if number else {"SAMESTEP_TOKEN": "token"}
        variables = {**by_hand(machines, number), **own}
        offset = clock_offset if number else 0
        running = host.run(sys.executable, *command, cwd=path, variables=variables, clock_offset=offset)
        commands.append(stack.enter_context(running))
    return commands


def ended(commands: Sequence[Running], seconds: float = END_SECONDS) -> list[Done]:
    """Return the results of commands that must end within some seconds and leave no process."""
    deadline = time.monotonic() + seconds
    results = [command.wait(max(1.0, deadline - time.monotonic())) for command in commands]
    for command in commands:
        until(lambda command=command: not command.processes(), "no process is left", 10, command.processes)
    return results


def single_report(results: Sequence[Done]) -> str:
    """Return the only report of all ranks."""
    reports = [result.err for result in results if "error: " in result.err]
    assert len(reports) == 1, results
    require_bounded(reports[0])
    assert reports[0].count("error: ") == 1, reports[0]
    return reports[0]


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
        results = ended(train_on(machines, stack, tmp_path, ranks), 120)
    assert [result.code for result in results] == [0] * count, results
    (environment,) = json.loads((tmp_path / "runs/many/environment.json").read_text(encoding="utf-8"))
    assert environment["processes"] == count * ranks
    assert weights(tmp_path / "runs/many") == undisturbed


@pytest.mark.long
def test_slow_link(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        for host in machines:
            host.slow("4mbit")
        results = ended(train_on(machines, stack, tmp_path, 1), 120)
    assert [result.code for result in results] == [0, 0], results
    assert weights(tmp_path / "runs/many") == undisturbed
    record_fault("the links of two hosts have 4 Mbit/s", "the same weights", "exit code 0; the same weights")


@pytest.mark.long
def test_clocks_that_differ(tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    """The kernel has no wall clock per namespace: `time.time` of Python is ahead, and the kernel's monotonic clock."""
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    text = "import time\nnow = time.time\ntime.time = lambda: now() + 86400\n"
    (ahead / "sitecustomize.py").write_text(text, encoding="utf-8")
    with hosts(2) as machines, ExitStack() as stack:
        commands = by_variables(
            machines, stack, tmp_path, *TRAIN_DIGITS, python_path=f"{ahead}:{SOURCES}", clock_offset=86400
        )
        results = ended(commands, 120)
    assert [result.code for result in results] == [0, 0], results
    assert weights(tmp_path / "runs/many") == undisturbed
    fault = "the clocks of one host, monotonic and that of Python's time.time, are a day ahead"
    record_fault(fault, "the same weights", "exit code 0; the same weights")


def held_run(machines: Sequence[Host], stack: ExitStack, path: Path) -> list[Running]:
    """Start a run whose rank 0 waits in call 20 of the loss, after the checkpoint of step 3."""
    (path / "hold").write_text("0 20", encoding="utf-8")
    options = ("--name", "many", "--checkpoint-every", 3, "--hang-after", f"{HANG_SECONDS}s")
    commands = by_variables(machines, stack, path, "-m", "samestep", "train", RECIPE, *options)
    # The hold must be shorter than the time that counts as a hang.
    commands[0].until(lambda: len(events(path / "runs/many", "step")) >= 6, "6 steps")
    return commands


def require_resumable(path: Path) -> None:
    """Require that one process resumes the run to the weights of an undisturbed run."""
    (path / "hold").unlink(missing_ok=True)
    assert here("resume", path / "runs/many", cwd=path) == 0
    assert here("train", RECIPE, "--name", "one", cwd=path) == 0
    assert weights(path / "runs/many") == weights(path / "runs/one")


@pytest.mark.long
def test_host_that_dies(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        main, lost = held_run(machines, stack, tmp_path)
        machines[1].cut()  # otherwise its kernel would end the connections
        for process in lost.processes():
            lost.try_kill_process(process, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        results = ended([main])
    assert results[0].code == 1, results
    assert "E_HANG" in single_report(results)
    assert "rank 1: on host h1" in results[0].err, results[0].err
    require_resumable(tmp_path)
    expected = "the other ranks end, and name host and rank; resumed to the same weights"
    record_fault("a host dies", expected, "exit code 1; E_HANG names rank 1 on host h1; resumed on 1: the same weights")


@pytest.mark.long
def test_cut_link(tmp_path: Path, record_fault: RecordFault) -> None:
    with hosts(2) as machines, ExitStack() as stack:
        commands = held_run(machines, stack, tmp_path)
        machines[1].cut()
        (tmp_path / "hold").unlink()
        results = ended(commands)
    assert [result.code for result in results] == [1, 1], results
    assert "rank 1: on host h1" in single_report(results[:1])
    assert "error: rank 0 hangs" in single_report(results[1:])  # its host has no connection to agree on a report
    require_resumable(tmp_path)
    expected = "all ranks end, with one report per host; resumed to the same weights"
    record_fault("the link of a host is cut", expected, "exit code 1 on both; E_HANG; resumed on 1: the same weights")


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


def require_refused(path: Path, python_path: str, code: str, *names: str) -> None:
    """Require that a run with another import path on host h1 ends before training, with one report."""
    with hosts(2) as machines, ExitStack() as stack:
        command = ("-m", "samestep", "train", RECIPE, "--name", "many")
        results = ended(by_variables(machines, stack, path, *command, python_path=python_path))
    assert [result.code for result in results] == [2, 2], results
    report = single_report(results)
    assert all(name in report for name in (code, "rank 1 on host h1", *names)), report
    assert not events(path / "runs/many", "step")


@pytest.mark.long
def test_other_torch_version(tmp_path: Path, record_fault: RecordFault) -> None:
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
        tmp_path, f"{other.parent}:{SOURCES}:{TESTS}", "E_SOFTWARE_DIFFERS", "torch 2.9.1+other", torch.__version__
    )
    observed = "exit code 2 on both; E_SOFTWARE_DIFFERS names rank 1 on host h1 and both versions"
    record_fault("a host has another version of torch", "refused before training, by name", observed)


@pytest.mark.long
def test_other_version_of_samestep(tmp_path: Path, record_fault: RecordFault) -> None:
    shutil.copytree(SOURCES, tmp_path / "src")
    with (tmp_path / "src/samestep/engine/engine.py").open("a", encoding="utf-8") as file:
        file.write("# another revision\n")
    require_refused(tmp_path, f"{tmp_path / 'src'}:{TESTS}", "E_SOFTWARE_DIFFERS", "Samestep source")
    observed = "exit code 2 on both; E_SOFTWARE_DIFFERS names rank 1 on host h1"
    record_fault("a host has another revision of Samestep", "refused before training, by name", observed)


@pytest.mark.long
def test_other_user_code(tmp_path: Path, record_fault: RecordFault) -> None:
    shutil.copytree(TESTS / "helpers", tmp_path / "tests/helpers")
    with (tmp_path / "tests/helpers/recorded.py").open("a", encoding="utf-8") as file:
        file.write("# another revision\n")
    require_refused(tmp_path, f"{SOURCES}:{tmp_path / 'tests'}", "E_CODE_CHANGED", "helpers.recorded")
    observed = "exit code 2 on both; E_CODE_CHANGED names rank 1 on host h1 and the module"
    record_fault("a host has other modules of the user", "refused before training, by name", observed)
