"""Faults that are really there, each in a process of its own, are found and say what to do."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from doctor_faults import FAULTS, RANK, Fault, doctor, require


def bad(findings: Mapping[str, Any]) -> list[Any]:
    return [finding for finding in findings.values() if finding["verdict"] in ("warn", "fail")]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    require(fault.namespace)
    code, findings = doctor(tmp_path, fault=fault)
    found = [finding for name, finding in findings.items() if name.startswith(fault.name)]
    assert found, findings.keys()
    assert found[0]["verdict"] == fault.verdict, found
    assert fault.says in found[0]["value"]
    assert fault.do in found[0]["do"]
    assert found[0]["rule"]
    assert code == (3 if any(each["verdict"] == "fail" for each in findings.values()) else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is shown to root alone")
def test_port_that_is_taken_names_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        fault = Fault("", "", "", {**RANK, "MASTER_PORT": str(port)})
        code, findings = doctor(tmp_path, fault=fault)
    found = findings["port where ranks meet"]
    assert (code, found["verdict"]) == (3, "fail")
    assert f"MASTER_PORT {port}: it is taken, by process {os.getpid()}" in found["value"]
    assert f"end process {os.getpid()}" in found["do"]
    assert doctor(tmp_path, fault=fault)[1]["port where ranks meet"]["verdict"] == "pass"


def test_nothing_is_found_on_this_machine(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path)
    assert bad(findings) == []
    assert code == 0


@pytest.mark.slow
def test_nothing_is_found_by_ranks_either(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path, quick=False)
    assert bad(findings) == []
    assert findings["self-test"]["verdict"] == "pass"
    assert code == 0
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("", "", "", {"GLOO_SOCKET_IFNAME": "nosuch0"}), "Unable to find address for: nosuch0"),
        (Fault("", "", "", shell="ulimit -v 600000"), "the fork server of the ranks was killed"),
    ],
    ids=["in a rank", "before there are ranks"],
)
def test_ranks_that_fail_are_told(fault: Fault, says: str, tmp_path: Path) -> None:
    code, findings = doctor(tmp_path, fault=fault, quick=False)
    assert (code, findings["self-test"]["verdict"]) == (3, "fail")
    assert says in findings["self-test"]["value"]
    assert "lines above" in findings["self-test"]["do"]
