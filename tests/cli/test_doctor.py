"""What the doctor finds, and says a command would do."""

import json
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.runtime.rendezvous import READ
from started import as_mpirun, as_srun


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
    assert main(["doctor", "--json"]) == 0
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
    assert main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "RANK is set but WORLD_SIZE" in said
    assert "would refuse to start" in said


def test_devices_without_any_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for more, message in (
        ([], "torch sees no GPU on this machine"),
        (["--device", "cpu"], "--devices 0 with --device cpu"),
    ):
        assert main(["train", "digits", "--runs", str(tmp_path), "--devices", "0", *more]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
