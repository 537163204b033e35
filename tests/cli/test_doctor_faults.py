"""Tests of `samestep doctor` with real faults in separate processes."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.doctor_faults import FAULTS, RANK, Fault, doctor, require
from helpers.started import free_port


def problems(findings: Mapping[str, Any]) -> list[Any]:
    return [finding for finding in findings.values() if finding["verdict"] in ("warn", "fail")]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault(fault: Fault, tmp_path: Path) -> None:
    require(fault.namespace)
    code, findings = doctor(tmp_path, fault=fault)
    matches = [finding for name, finding in findings.items() if name.startswith(fault.name)]
    assert matches, findings.keys()
    finding = matches[0]
    assert finding["verdict"] == fault.verdict, matches
    assert fault.value in finding["value"]
    assert fault.fix in finding["fix"]
    assert finding["expected"]
    assert code == (3 if any(finding["verdict"] == "fail" for finding in findings.values()) else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only root may list listening processes")
def test_rendezvous_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as listener:
        port = free_port()
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
        fault = Fault("", "", "", {**RANK, "MASTER_PORT": str(port)})
        code, findings = doctor(tmp_path, fault=fault)
    finding = findings["rendezvous port"]
    assert (code, finding["verdict"]) == (3, "fail")
    assert finding["value"] == f"MASTER_PORT {port}: in use, by process {os.getpid()}"
    assert f"end process {os.getpid()}" in finding["fix"]
    assert doctor(tmp_path, fault=fault)[1]["rendezvous port"]["verdict"] == "pass"


def test_no_problems_on_this_machine(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path)
    assert problems(findings) == []
    assert code == 0


@pytest.mark.slow
def test_no_problems_in_ranks(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path, quick=False)
    assert problems(findings) == []
    assert findings["self-test"]["verdict"] == "pass"
    assert code == 0
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "value"),
    [
        (Fault("", "", "", {"GLOO_SOCKET_IFNAME": "nosuch0"}), "nosuch0"),
        (Fault("", "", "", shell="ulimit -v 600000"), "address space"),
    ],
    ids=["in a rank", "before ranks start"],
)
def test_self_test_failure(fault: Fault, value: str, tmp_path: Path) -> None:
    code, findings = doctor(tmp_path, fault=fault, quick=False)
    finding = findings["self-test"]
    assert (code, finding["verdict"]) == (3, "fail")
    assert value in finding["value"]
    assert "failures above" in finding["fix"]
