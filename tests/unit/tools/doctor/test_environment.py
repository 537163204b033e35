"""Tests of the checks of variables, launcher, versions, network and runs folder."""

import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.started import as_mpirun, as_srun
from samestep.distributed.addresses import free_loopback_socket
from samestep.distributed.launcher_detection import find_rendezvous
from samestep.distributed.resources import Processors
from samestep.errors import InputError
from samestep.tools.doctor.environment import (
    check_interfaces,
    check_launcher,
    check_network,
    check_rendezvous_address,
    check_variables,
    loopback_error,
    resolve,
)
from samestep.tools.doctor.findings import Finding
from samestep.tools.doctor.gpus import Nvidia
from samestep.tools.doctor.machine import Folder, check_folder, read_folder
from samestep.tools.doctor.versions import Versions, check_builds, check_packages, conflict_finding, read_versions

EIGHT_PROCESSORS = Processors(8, 8)


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("NCCL_P2P_DISABLE", "1", "warn"),
        ("NCCL_DEBUG", "INFO", "info"),
        ("NCCL_DEBUG", "WARN", None),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8", "warn"),
        ("NVIDIA_TF32_OVERRIDE", "0", "warn"),
        ("OMP_PROC_BIND", "close", "warn"),
        ("OMP_PROC_BIND", "false", None),
        ("ATEN_CPU_CAPABILITY", "avx2", "info"),
    ],
)
def test_variable(name: str, value: str, verdict: str | None) -> None:
    result = verdicts(check_variables({name: value}, EIGHT_PROCESSORS))
    assert result.get(name) == verdict
    assert ("environment variables" in result) == (verdict != "warn")


@pytest.mark.parametrize(("value", "verdict"), [("1", "pass"), ("8,2", "pass"), ("9", "warn"), ("", "warn")])
def test_thread_variables(value: str, verdict: str) -> None:
    result = verdicts(check_variables({"OMP_NUM_THREADS": value}, EIGHT_PROCESSORS))
    assert result == {"environment variables": "pass", "OMP_NUM_THREADS": verdict}


def test_slurm_processors_per_task() -> None:
    variables = {"SLURM_CPUS_PER_TASK": "8"}
    assert verdicts(check_launcher(None, variables, EIGHT_PROCESSORS)) == {"launcher": "pass"}
    result = verdicts(check_launcher(None, variables, Processors(8, 2)))
    assert result == {"launcher": "pass", "SLURM_CPUS_PER_TASK": "warn"}


def test_launchers() -> None:
    assert verdicts(check_launcher(None, {}, EIGHT_PROCESSORS)) == {"launcher": "pass"}
    rendezvous = find_rendezvous({**as_srun("17")(1, 4), **as_mpirun(1, 4)})
    result = verdicts(check_launcher(rendezvous, {}, EIGHT_PROCESSORS))
    assert result == {"launcher": "pass", "ignored launcher": "info"}
    [finding] = check_launcher(InputError("RANK is 'x'", expected="a number", fix="unset it"), {}, EIGHT_PROCESSORS)
    assert finding == Finding("launcher", "fail", "RANK is 'x'", "a number", "unset it")


def test_installed_versions_are_compatible() -> None:
    result = verdicts(check_packages(read_versions()))
    assert result["packages"] == result["requirements"] == "pass"


def test_missing_packages() -> None:
    conflict = conflict_finding("torch 2", "sympy", None)
    result = verdicts(check_packages(Versions("3.12.0", {"torch": "2.10.0"}, (conflict,))))
    assert (result["packages"], result["requirements of torch"], result["samestep[zoo]"]) == ("fail", "warn", "info")
    conflict = conflict_finding("samestep 1", "torch>=2.10", "2.1.0")
    assert verdicts(check_packages(Versions("3.12.0", {}, (conflict,))))["requirements of samestep"] == "fail"


@pytest.mark.parametrize(
    ("cuda", "driver", "name", "verdict"),
    [
        (None, None, "torch build", "pass"),
        (None, "550.54.15", "torch build", "fail"),
        ("12.8", None, "torch build", "info"),
        ("12.8", "550.54.15", "CUDA and driver", "pass"),
        ("12.8", "470.82.01", "CUDA and driver", "fail"),
        ("13.0", "570.26", "CUDA and driver", "fail"),
    ],
)
def test_builds(cuda: str | None, driver: str | None, name: str, verdict: str) -> None:
    versions = Versions("3.12.0", {}, cuda=cuda)
    assert verdicts(check_builds(versions, Nvidia(driver)))[name] == verdict


def test_resolve() -> None:
    assert resolve("127.0.0.1") == ("127.0.0.1",)
    assert resolve("no-such-host.invalid") == ()
    assert resolve("." * 300) == ()
    assert isinstance(resolve(socket.gethostname()), tuple)


def test_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(check_network(loopback_error())) == {"host name": "pass", "loopback interface": "pass"}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert verdicts(check_network("refused")) == {"host name": "warn", "loopback interface": "fail"}


def test_rendezvous_address() -> None:
    assert verdicts(check_rendezvous_address(None)) == {"rendezvous address": "info"}
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with free_loopback_socket() as listener:
        rank["MASTER_PORT"] = str(listener.getsockname()[1])
        used = verdicts(check_rendezvous_address(find_rendezvous(rank)))
        assert used == {"rendezvous address": "pass", "rendezvous port": "fail"}
        # Another process would listen, or one of another machine.
        for change in ({"RANK": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"MASTER_ADDR": "192.0.2.1"}):
            result = verdicts(check_rendezvous_address(find_rendezvous({**rank, **change})))
            assert result == {"rendezvous address": "pass"}
    assert verdicts(check_rendezvous_address(find_rendezvous(rank)))["rendezvous port"] == "pass"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "pass"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "pass"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "info"),
    ],
)
def test_interfaces(name: str, value: str, verdict: str) -> None:
    assert verdicts(check_interfaces({name: value}, ("lo", "eth0"))) == {name: verdict}


def test_folder_is_unchanged_after_the_trial(tmp_path: Path) -> None:
    folder = read_folder(tmp_path / "runs" / "deep")
    assert folder.error is None
    assert folder.locks
    assert folder.free
    assert list(tmp_path.iterdir()) == []
    assert verdicts(check_folder(folder))["runs folder"] == "pass"


def test_folder() -> None:
    folder = Folder("runs", free=1 << 40)
    assert verdicts(check_folder(folder)) == {"runs folder": "pass", "free space for runs": "pass"}
    assert verdicts(check_folder(replace(folder, locks=False)))["file locks"] == "warn"
    assert verdicts(check_folder(replace(folder, free=1 << 20)))["free space for runs"] == "warn"
    assert verdicts(check_folder(replace(folder, error="cannot write")))["runs folder"] == "fail"
