"""Limits of open files, processes, threads and memory: one report with the number that the ranks need."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from helpers.machines import in_shell
from helpers.surroundings import RecordFault, require_single_report
from helpers.system import TESTS, Running, until
from samestep.distributed.resources import usable_processors

RECIPE = TESTS / "helpers" / "recorded.yaml"
PIDS = Path("/sys/fs/cgroup/pids")
# Root has no limit of processes. The capability lets the account read the files of the tests.
ACCOUNT = "setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps +dac_override --ambient-caps +dac_override"


# Setup, number of ranks, options, and a part of the report.
FILES: dict[str, tuple[str, int, tuple[object, ...], str]] = {
    "55 open files for 2 ranks": ("ulimit -n 55", 2, (), "at least 56 open files per process for 2 ranks"),
    "60 open files for 4 ranks": ("ulimit -n 60", 4, (), "at least 64 open files per process for 4 ranks"),
    "64 open files for 2 ranks with 2 loader workers": ("ulimit -n 64", 2, ("--workers", 2), "at least 80 open files"),
    "200 MB of address space": ("ulimit -v 200000", 2, (), "at least 1048576 KiB"),
    "600 MB of address space": ("ulimit -v 600000", 1, (), "at least 1048576 KiB"),
}


def refused(path: Path, command: tuple[str, ...], processes: int, *options: object) -> str:
    """Return the report of a run that a limit refuses, with exit code 2, no hang and no traceback."""
    begin = ("train", RECIPE, "--name", "a", "--processes", processes)
    with Running(*begin, *options, cwd=path, command=command) as running:
        done = running.wait(60)
        until(lambda: not running.processes(), "no process is left", 10)
    assert "E_MACHINE" in require_single_report(done, 2)
    assert "Traceback" not in done.err
    assert "fix: " in done.err
    return done.err


@pytest.mark.slow
@pytest.mark.parametrize("fault", FILES)
def test_low_limit_of_a_process(fault: str, tmp_path: Path, record_fault: RecordFault) -> None:
    setup, processes, options, part = FILES[fault]
    assert part in refused(tmp_path, in_shell(setup), processes, *options)
    record_fault(fault, "exit code 2; E_MACHINE")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3, 8, 16])
def test_few_processes_of_an_account(limit: int, tmp_path: Path, record_fault: RecordFault) -> None:
    """Even one process: nothing can be started then."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another account")
    tmp_path.chmod(0o777)
    setup = f"export HOME=$PWD TMPDIR=$PWD XDG_STATE_HOME=$PWD XDG_CACHE_HOME=$PWD; ulimit -u {limit}"
    report = refused(tmp_path, (*ACCOUNT.split(), *in_shell(setup)), 2)
    assert f"at least {20 + usable_processors()} for 1 rank" in report
    assert "ulimit -u" in report
    record_fault(f"an account with at most {limit} processes and threads", "exit code 2; E_MACHINE")


@contextmanager
def group_with(most: int) -> Iterator[Path]:
    """Make a control group with a limit of processes and threads, as a container has."""
    folder = PIDS / f"samestep-{uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "pids.max").write_text(str(most), encoding="ascii")
    except OSError as error:
        pytest.skip(f"control groups: {error}")
    try:
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(encoding="ascii"), "no process is left", 20)
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("most", "processes"), [(8, 1), (30, 2)])
def test_few_processes_of_a_container(most: int, processes: int, tmp_path: Path, record_fault: RecordFault) -> None:
    with group_with(most) as group:
        report = refused(tmp_path, in_shell(f"echo $$ > {group}/cgroup.procs"), processes)
    assert f"at least {6 + 14 * processes + usable_processors()} for {processes} rank" in report
    record_fault(f"a container with {most} processes and threads for {processes} ranks", "exit code 2; E_MACHINE")


@pytest.mark.slow
def test_limits_that_suffice(tmp_path: Path, record_fault: RecordFault) -> None:
    """The refused limits are not higher than needed: a run has exactly these."""
    most = 6 + 14 * 2 + usable_processors() + 4  # next to the command, its fork server and the tracker of resources
    with group_with(most) as group:
        setup = f"echo $$ > {group}/cgroup.procs; ulimit -v 1048576; ulimit -n 56"
        begin = ("train", RECIPE, "--name", "a", "--processes", 2, "epochs=1")
        with Running(*begin, cwd=tmp_path, command=in_shell(setup)) as running:
            done = running.wait(90)
    assert done.code == 0, done.err
    record_fault("the smallest numbers of files, processes, threads and bytes for 2 ranks", "exit code 0")


LOOP = """
import time, torch, samestep
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {read}
        return torch.ones(8), torch.zeros(())
model = samestep.parallel(torch.nn.Linear(8, 1))
world = samestep.init()
open(f"ready-{{world.rank}}", "w").close()
batches = samestep.loader(Data(), batch_size=8, num_workers={workers})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = samestep.CheckpointManager("checkpoints", model, batches, optimizer=optimizer)
for _ in checkpoints.epochs(2):
    for inputs, _ in batches:
        {step}
        model(inputs).sum().backward()
        optimizer.step()
        checkpoints.save()
"""
MOST_SEVERE = "C code that never returns"
HANGS = {
    "a data set that never returns": {"read": "time.sleep(1000)"},
    "a loader worker that never returns": {"read": "time.sleep(1000)", "workers": 1},
    "a step of one rank that never returns": {"step": "if world.rank: time.sleep(1000)"},
    MOST_SEVERE: {"step": "if world.rank: torch.ones(1).apply_(lambda value: time.sleep(1000))"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang", [*(pytest.param(hang, marks=pytest.mark.long) for hang in HANGS if hang != MOST_SEVERE), MOST_SEVERE]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_stop_during_a_hang_ends_after_the_grace(
    hang: str, number: signal.Signals, tmp_path: Path, record_fault: RecordFault
) -> None:
    parts = {"read": "pass", "step": "pass", "workers": 0} | HANGS[hang]
    (tmp_path / "loop.py").write_text(LOOP.format(**parts), encoding="utf-8")
    options = ("--processes", 2, "--own-group", "--hang-after", "10m", "--grace", "2s")
    with Running("run", *options, "loop.py", cwd=tmp_path) as running:
        running.until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks", 120)
        time.sleep(1)
        began = time.monotonic()
        running.kill(number)
        done = running.wait(60)
        until(lambda: not running.processes(), "no process is left", 20)
    assert "E_STOPPED" in require_single_report(done, 130)
    assert time.monotonic() - began < 20
    record_fault(f"{number.name} during a hang, {hang}, with --grace 2s", "exit code 130; E_STOPPED")
