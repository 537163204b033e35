"""Tests of `samestep doctor`: report, real faults in separate processes, self-test, and caches."""

import signal
from pathlib import Path

import pytest

from helpers.doctor_faults import FAULTS, Fault, doctor, require
from helpers.system import Running, answer, here, until
from samestep.cli.main import main
from samestep.zoo.sample_cache import SampleCache


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
        Fault("", "E_LAUNCHER_GONE", "", shell="ulimit -v 600000"),
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


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "samestep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, kind in (("photos-1", "decoded"), ("photos-2", "decoded")):
        cache = SampleCache(folder / name, {"kind": kind, "source": "/photos"}, limit=None, samples=9)
        for number in range(3):
            cache.add((number, number), memoryview(bytes(1000)))
    assert here("doctor", "--caches", "--json", cwd=tmp_path) == 0
    listed = answer(capsys)
    rows = [(cache["name"], cache["kind"], cache["entries"], cache["source"]) for cache in listed["caches"]]
    assert rows == [("photos-1", "decoded", 3, "/photos"), ("photos-2", "decoded", 3, "/photos")]
    assert listed["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (folder / "photos-1/cache.json").write_text("[", encoding="utf-8")
    assert here("doctor", "--clear-caches", cwd=tmp_path) == 0
    assert "photos-1  unknown" in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_devices_option_without_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        ([], "torch sees 0"),
        (["--device", "cpu"], "--devices with --device cpu"),
    ):
        assert main(["train", "digits", "--runs", str(tmp_path), "--devices", "0", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
