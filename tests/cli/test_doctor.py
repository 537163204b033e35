"""What the doctor prints, and says a command would do."""

import json
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.runtime.rendezvous import READ
from started import as_mpirun, as_srun
from system import answer


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*READ, "SAMESTEP_TOKEN", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--launch"]) == 0
    said = capsys.readouterr().out
    assert "no launcher's variables are set" in said
    assert "samestep train would start 1 process" in said


def test_under_slurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**as_srun("17")(1, 4), **as_mpirun(1, 4), "SAMESTEP_TOKEN": "not to be shown"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--launch", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "not to be shown" not in printed
    found = json.loads(printed)
    launcher = found["launcher"]
    assert (launcher["name"], launcher["rank"], launcher["world size"]) == ("Slurm", 1, 4)
    assert launcher["passed over"] == [
        "Open MPI: OMPI_COMM_WORLD_RANK 1 of OMPI_COMM_WORLD_SIZE 4 are set, as mpirun does"
    ]
    assert found["variables"]["SLURM_PROCID"] == "1"
    assert found["network"]["interface"] in ("loopback", "lo", "lo0")
    assert found["network"]["token"] == "set"
    assert found["train"] == "samestep train would be rank 1 of 4, and start no processes"


def test_what_a_command_would_refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor", "--launch"]) == 2
    said = capsys.readouterr().out
    assert "RANK is set but WORLD_SIZE" in said
    assert "would refuse to start" in said


def test_json_is_a_list_of_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json", "--runs", str(tmp_path)]) in (0, 3)
    found = answer(capsys)
    assert set(found) == {"verdict", "plan", "findings"}
    for finding in found["findings"]:
        assert set(finding) == {"name", "verdict", "value", "rule", "do"}
        assert finding["verdict"] in ("pass", "info", "warn", "fail")
        assert finding["name"] and finding["value"]
        is_bad = finding["verdict"] in ("warn", "fail")
        assert is_bad == bool(finding["rule"]) == bool(finding["do"])


def test_what_is_printed_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("")
    assert main(["doctor", "--quick", "--processes", "2", "--runs", str(tmp_path / "runs")]) == 3
    said = capsys.readouterr().out
    assert "do:   name a folder on a disk with room" in " ".join(said.split()).replace("do: ", "do:   ")
    assert "checked for 2 ranks with 1 thread" in said


@pytest.mark.parametrize(
    "wrong",
    [
        ["--processes", "none"],
        ["--workers", "-1"],
        ["--threads", "0"],
        ["--worker-memory", "much"],
        ["--bundle", "report.zip", "--launch"],
    ],
)
def test_wrong_input(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_test_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--runs", str(tmp_path)])
    findings = {finding["name"]: finding for finding in answer(capsys)["findings"]}
    assert findings["self-test"]["verdict"] == "pass", findings["self-test"]
    assert "GB/s" in findings["all-reduce"]["value"]
    assert code == (3 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


def test_devices_without_any_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for more, message in (
        ([], "torch sees no GPU on this machine"),
        (["--device", "cpu"], "--devices 0 with --device cpu"),
    ):
        assert main(["train", "digits", "--runs", str(tmp_path), "--devices", "0", *more]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
