"""Tests of `samestep doctor`: report, real faults in separate processes, and self-test."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.system import COMMAND, Running, answer, until
from samestep.cli.main import main
from samestep.distributed.env import relevant_variables


@dataclass(frozen=True)
class Fault:
    """A fault of the machine or the environment, and the expected finding.

    Attributes:
        name: beginning of the finding's name.
        value: part of the finding's value.
        fix: part of the finding's fix.
        variables: environment variables of the process.
        shell: commands of the shell that becomes the process; `$RUNS` is the runs folder.
        options: further options of the command.
        namespace: option of unshare(1) for a separate namespace.
        plant: prepares the folder of the test.
    """

    name: str
    value: str
    fix: str
    variables: Mapping[str, str] = field(default_factory=dict)
    shell: str = ":"
    options: Sequence[str] = ()
    namespace: str | None = None
    plant: Callable[[Path], None] | None = None
    verdict: str = "fail"


def _plant_file(folder: Path) -> None:
    (folder / "runs").rmdir()
    (folder / "runs").write_text("")


def _plant_nvidia(folder: Path) -> None:
    """Create an nvidia-smi command with fixed output."""
    command = folder / "planted" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 40960"\n')
    command.chmod(0o755)


FAULTS = {
    "few open files": Fault("open files", "32 per process", "ulimit -n 65536", shell="ulimit -n 32"),
    "many threads": Fault(
        "OMP_NUM_THREADS", "1000", "export OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1000"}, verdict="warn"
    ),
    "incomplete launcher variables": Fault("launcher", "RANK set, but not WORLD_SIZE", "unset RANK", {"RANK": "0"}),
    "more ranks than processors": Fault(
        "processors",
        "for 4 ranks",
        "--processes 1",
        shell="taskset -p -c 0 $$ >&2",
        options=("--processes", "4"),
        verdict="warn",
    ),
    "workers larger than memory": Fault(
        "memory", "for 2 ranks", "fewer --processes or --workers", options=("--workers", "99999")
    ),
    "file instead of folder": Fault("runs folder", "Not a directory", "--runs DIR", plant=_plant_file),
    "read-only folder": Fault(
        "runs folder",
        "Read-only file system",
        "--runs DIR",
        shell='mount --bind "$RUNS" "$RUNS" && mount -o remount,ro,bind "$RUNS"',
        namespace="--mount",
    ),
    "small disk": Fault(
        "free space for runs",
        "16 MiB",
        "free space",
        shell='mount -t tmpfs -o size=16m none "$RUNS"',
        namespace="--mount",
        verdict="warn",
    ),
    "small shared memory": Fault(
        "shared memory",
        "16 MiB free",
        "--shm-size",
        shell="mount -t tmpfs -o size=16m none /dev/shm",
        options=("--workers", "2"),
        namespace="--mount",
    ),
    "GPU memory in use": Fault(
        "memory of GPU 0", "40 GiB of 79.6 GiB in use", "nvidia-smi", plant=_plant_nvidia, verdict="warn"
    ),
}


def doctor(folder: Path, *, fault: Fault = Fault("", "", ""), quick: bool = True) -> tuple[int, dict[str, Any]]:
    """Run doctor with a fault, without other variables that it checks; return exit code and findings by name."""
    (folder / "runs").mkdir(exist_ok=True)
    if fault.plant is not None:
        fault.plant(folder)
    planted = str(folder / "planted")
    variables = {name: value for name, value in os.environ.items() if name not in relevant_variables()}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [planted, variables.get("PYTHONPATH")]))
    variables["PATH"] = f"{planted}:{variables['PATH']}"
    namespace = ("unshare", "--map-root-user", fault.namespace) if fault.namespace else ()
    options = ["--processes", "2", "--workers", "0", *fault.options, "--runs", str(folder / "runs")]
    options += ["--quick"] if quick else []
    done = subprocess.run(
        [*namespace, "bash", "-ec", f'{fault.shell}\nexec "$@"', "bash", *COMMAND, "doctor", "--json", *options],
        env={**variables, "RUNS": str(folder / "runs"), **fault.variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def require(namespace: str | None) -> None:
    """Skip the test if this user cannot create the namespace."""
    if namespace is None:
        return
    command = ["unshare", "--map-root-user", namespace, "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"namespaces are not available: {' '.join(command)}")


def test_json_is_a_list_of_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", "--runs", str(tmp_path)]) in (0, 3)
    report = answer(capsys)
    assert set(report) == {"verdict", "plan", "findings"}
    for finding in report["findings"]:
        assert set(finding) == {"name", "verdict", "value", "expected", "fix"}
        assert finding["verdict"] in ("pass", "info", "warn", "fail")
        assert finding["name"] and finding["value"]
        is_bad = finding["verdict"] in ("warn", "fail")
        assert is_bad == bool(finding["expected"]) == bool(finding["fix"])


def test_printed_failure_has_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("")
    assert main(["doctor", "--quick", "--processes", "2", "--runs", str(tmp_path / "runs")]) == 3
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("fail  runs folder"))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["expected", "fix"]
    assert "1 fail" in lines[-1]


@pytest.mark.parametrize("arguments", [["--processes", "none"], ["--workers", "-1"], ["--bundle", "report.zip"]])
def test_invalid_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault(fault: Fault, tmp_path: Path) -> None:
    require(fault.namespace)
    code, findings = doctor(tmp_path, fault=fault)
    finding = next(finding for name, finding in findings.items() if name.startswith(fault.name))
    assert finding["verdict"] == fault.verdict, finding
    assert fault.value in finding["value"]
    assert fault.fix in finding["fix"]
    assert code == (3 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


@pytest.mark.slow
def test_no_problems_in_ranks(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path, quick=False)
    assert [finding for finding in findings.values() if finding["verdict"] in ("warn", "fail")] == []
    assert (code, findings["self-test"]["verdict"]) == (0, "pass")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("", "nosuch0", "", {"GLOO_SOCKET_IFNAME": "nosuch0"}),
        Fault("", "E_MACHINE", "", shell="ulimit -v 600000"),
        Fault("", "", "", namespace="--net"),
    ],
    ids=["in a rank", "before ranks start", "no loopback interface"],
)
def test_self_test_failure(fault: Fault, tmp_path: Path) -> None:
    require(fault.namespace)
    code, findings = doctor(tmp_path, fault=fault, quick=False)
    finding = findings["self-test"]
    assert (code, finding["verdict"]) == (3, "fail")
    assert fault.value in finding["value"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(4, marks=pytest.mark.long), 5])
def test_ctrl_c_is_no_finding(tmp_path: Path, processes: int) -> None:
    """With 4 processes, a rank reads the devices; with 5, the two ranks of the self-test run."""
    with Running("doctor", "--runs", tmp_path, cwd=tmp_path) as running:
        running.until(lambda: len(running.processes()) >= processes, "ranks of the self-test")
        running.kill_group(signal.SIGINT)
        done = running.wait(20)
        until(lambda: not running.processes(), "no process remains", 10)
    assert (done.code, done.out) == (130, ""), done.err
    assert "Traceback" not in done.err


def test_devices_option_without_gpus(refused: Callable[..., str]) -> None:
    for arguments, message in (([], "torch sees 0"), (["--device", "cpu"], "--devices with --device cpu")):
        assert message in refused("train", "digits", "--devices", "0", *arguments)
