"""Tests of `samestep doctor` and `samestep doctor --launch`."""

import json
import signal
from pathlib import Path

import pytest

from helpers.started import as_mpirun, as_srun
from helpers.system import Running, answer, until
from samestep.cli.main import main
from samestep.distributed.launcher_detection import LAUNCH_VARIABLES


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCH_VARIABLES, "SAMESTEP_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_launch_without_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--launch"]) == 0
    out = capsys.readouterr().out
    assert "no launcher's variables are set" in out
    assert "samestep train would start 1 process" in out


def test_launch_under_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**as_srun("17")(1, 4), **as_mpirun(1, 4), "SAMESTEP_TOKEN": "not to be shown"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--launch", "--json"]) == 0
    out = capsys.readouterr().out
    assert "not to be shown" not in out
    facts = json.loads(out)
    launcher = facts["launcher"]
    assert (launcher["name"], launcher["rank"], launcher["world size"]) == ("Slurm", 1, 4)
    assert "OMPI_COMM_WORLD_RANK" in str(launcher)
    assert facts["variables"]["SLURM_PROCID"] == "1"
    assert facts["network"]["interface"] in ("loopback", "lo", "lo0")
    assert facts["network"]["token"] == "set"
    assert "rank 1 of 4" in facts["train"]


def test_launch_with_refused_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor", "--launch"]) == 2
    out = capsys.readouterr().out
    assert "RANK is set but WORLD_SIZE" in out
    assert "would refuse to start" in out


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
    out = capsys.readouterr().out
    assert "fix: use a writable folder on a disk with free space" in " ".join(out.split())
    assert "checked for 2 ranks with 1 thread" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--processes", "none"],
        ["--workers", "-1"],
        ["--threads", "0"],
        ["--worker-memory", "much"],
        ["--bundle", "report.zip", "--launch"],
    ],
)
def test_invalid_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_self_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--runs", str(tmp_path)])
    findings = {finding["name"]: finding for finding in answer(capsys)["findings"]}
    assert findings["self-test"]["verdict"] == "pass", findings["self-test"]
    assert "summed" in findings["self-test"]["value"]
    assert code == (3 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


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


def test_devices_option_without_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        ([], "torch sees no GPU on this machine"),
        (["--device", "cpu"], "--devices 0 with --device cpu"),
    ):
        assert main(["train", "digits", "--runs", str(tmp_path), "--devices", "0", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_shared_gpus_on_a_cpu_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "digits", "--runs", str(tmp_path), "--share-gpu", "--device", "cpu"]) == 2
    assert "--share-gpu with --device cpu [E_OPTION_CONFLICT]" in capsys.readouterr().err
