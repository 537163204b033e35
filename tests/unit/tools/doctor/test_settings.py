"""What is judged of variables, launchers, versions, network and files, by facts that are planted."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.errors import InputError
from samestep.runtime.rendezvous import find_rendezvous
from samestep.tools.doctor.files import Folder, check_folder, check_times, read_folder
from samestep.tools.doctor.finding import Finding
from samestep.tools.doctor.meeting import Meeting, check_meeting
from samestep.tools.doctor.network import Network, check_interfaces, check_loopback, resolve
from samestep.tools.doctor.nvidia import Nvidia
from samestep.tools.doctor.processors import Processors
from samestep.tools.doctor.scheduler import Launcher, check_launcher, check_slurm, count_tasks
from samestep.tools.doctor.variables import EFFECTS, check_thread_variables, check_variables
from samestep.tools.doctor.versions import Conflict, Versions, check_builds, check_nccl, check_packages, read_versions
from started import as_mpirun, as_srun

EIGHT = Processors(8, 8)
NETWORK = Network("machine", ("10.0.0.1",), None, 3, ("lo", "eth0"))


def verdicts(findings: object) -> dict[str, str]:
    assert not isinstance(findings, Finding)
    return {finding.name: finding.verdict for finding in findings}  # type: ignore[attr-defined]


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
        ("PYTHONHASHSEED", "0", "info"),
        ("ATEN_CPU_CAPABILITY", "avx2", "info"),
    ],
)
def test_variable(name: str, value: str, verdict: str | None) -> None:
    found = verdicts(check_variables({name: value}))
    assert found.get(name) == verdict
    assert ("environment variables" in found) == (verdict != "warn")


def test_each_variable_has_one_effect() -> None:
    assert len({effect.name for effect in EFFECTS}) == len(EFFECTS)


@pytest.mark.parametrize(("value", "verdict"), [("1", "pass"), ("8,2", "pass"), ("9", "warn"), ("", "warn")])
def test_threads(value: str, verdict: str) -> None:
    assert verdicts(check_thread_variables({"OMP_NUM_THREADS": value}, EIGHT)) == {"OMP_NUM_THREADS": verdict}


@pytest.mark.parametrize(("text", "count"), [("4", 4), ("2(x3),1", 7), ("1(x2)", 2), ("many", None), ("", None)])
def test_lists_of_tasks(text: str, count: int | None) -> None:
    assert count_tasks(text) == count


def test_slurm_that_agrees_with_itself() -> None:
    step = {**as_srun("17", nodes=3)(1, 3), "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_CPUS_PER_TASK": "8"}
    assert set(verdicts(check_slurm(step, EIGHT)).values()) == {"pass"}
    assert verdicts(check_slurm({**step, "SLURM_STEP_NODELIST": "n[1-4]"}, EIGHT))["SLURM_STEP_NUM_NODES"] == "fail"
    assert verdicts(check_slurm({**step, "SLURM_STEP_NODELIST": "n[1-"}, EIGHT))["SLURM_STEP_NUM_NODES"] == "fail"
    assert verdicts(check_slurm(step, Processors(8, 2)))["SLURM_CPUS_PER_TASK"] == "warn"
    assert verdicts(check_slurm({}, EIGHT)) == {}


def test_launchers() -> None:
    assert verdicts(check_launcher(Launcher())) == {"launcher": "pass"}
    found = find_rendezvous({**as_srun("17")(1, 4), **as_mpirun(1, 4)})
    assert verdicts(check_launcher(Launcher(found))) == {"launcher": "pass", "passed over": "info"}
    refused = Launcher(refused=InputError("RANK is 'x'", rule="a number", do="unset it"))
    assert list(check_launcher(refused)) == [Finding("launcher", "fail", "RANK is 'x'", "a number", "unset it")]


def test_versions_here_fit() -> None:
    found = verdicts(check_packages(read_versions()))
    assert found["packages"] == found["versions together"] == "pass"


def test_packages_that_are_not_there() -> None:
    found = verdicts(check_packages(Versions("3.12.0", {"torch": "2.10.0"}, (Conflict("torch", "2", "sympy", None),))))
    assert (found["packages"], found["what torch asks for"], found["extras"]) == ("fail", "warn", "info")
    old = Versions("3.12.0", {}, (Conflict("samestep", "1", "torch>=2.10", "2.1.0"),))
    assert verdicts(check_packages(old))["what samestep asks for"] == "fail"


@pytest.mark.parametrize(
    ("cuda", "driver", "vision", "name", "verdict"),
    [
        (None, None, "cpu", "torch's build", "pass"),
        (None, "550.54.15", "cpu", "torch's build", "fail"),
        ("12.8", None, "cu128", "torch's build", "info"),
        ("12.8", "550.54.15", "cu128", "CUDA and driver", "pass"),
        ("12.8", "470.82.01", "cu128", "CUDA and driver", "fail"),
        ("13.0", "570.26", "cu130", "CUDA and driver", "fail"),
        ("12.8", "550.54.15", "cu130", "torchvision's build", "warn"),
        ("12.8", "550.54.15", "cu128", "torchvision's build", "pass"),
        (None, None, "cu130", "torchvision's build", "info"),
    ],
)
def test_builds(cuda: str | None, driver: str | None, vision: str, name: str, verdict: str) -> None:
    versions = Versions("3.12.0", {}, cuda=cuda, vision_build=vision)
    assert verdicts(check_builds(versions, Nvidia(driver)))[name] == verdict


def test_nccl_that_another_library_hides() -> None:
    versions = Versions("3.12.0", {}, nccl="2.27.5")
    assert verdicts(check_nccl(versions, "2.27.5")) == {"NCCL": "pass"}
    assert verdicts(check_nccl(versions, "2.18.3")) == {"NCCL": "warn"}
    assert verdicts(check_nccl(versions, None)) == {}


def test_names_that_nobody_knows() -> None:
    assert resolve("127.0.0.1") == ("127.0.0.1",)
    assert resolve("no-such-host.invalid") == ()
    assert resolve("." * 300) == ()


def test_network() -> None:
    assert set(verdicts(check_loopback(NETWORK)).values()) == {"pass"}
    assert verdicts(check_loopback(replace(NETWORK, ports=0)))["free ports"] == "fail"
    assert verdicts(check_meeting(None)) == {"where ranks meet": "info"}
    elsewhere = Meeting("n1", ("10.0.0.2",), 29500)
    assert verdicts(check_meeting(elsewhere)) == {"address where ranks meet": "pass"}
    refused = Meeting("n1", ("10.0.0.1",), 80, is_ours=True, refusal="Permission denied")
    assert verdicts(check_meeting(refused))["port where ranks meet"] == "fail"


@pytest.mark.parametrize(
    ("name", "told", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "pass"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "pass"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "info"),
    ],
)
def test_interfaces(name: str, told: str, verdict: str) -> None:
    assert verdicts(check_interfaces(NETWORK, {name: told})) == {name: verdict}


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = read_folder(tmp_path / "runs" / "deep")
    assert found.failed is None
    assert found.locks
    assert found.free
    assert list(tmp_path.iterdir()) == []
    assert set(verdicts(check_folder(found)).values()) <= {"pass", "info"}
    assert check_times(found).verdict == "pass"


def test_folders() -> None:
    sound = Folder("runs", kind="ext4", free=1 << 40)
    assert set(verdicts(check_folder(sound)).values()) == {"pass", "info"}
    assert verdicts(check_folder(replace(sound, locks=False)))["locks of files"] == "warn"
    assert verdicts(check_folder(replace(sound, files_left=3)))["number of files"] == "warn"
    kinds = {"nfs4": "over the network", "tmpfs": "in memory", "overlay": "container's own", "fuse.sshfs": "network"}
    for kind, told in kinds.items():
        assert told in [each.value for each in check_folder(replace(sound, kind=kind))][-1]
    assert check_times(replace(sound, skew_seconds=-60.0)).verdict == "warn"
    assert check_times(replace(sound, failed="cannot")).verdict == "info"


def test_times_of_files_that_lie_ahead_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def of_another_clock(descriptor: int) -> None:
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_file():
            os.utime(path, (4e9, 4e9))

    monkeypatch.setattr(os, "fsync", of_another_clock)
    assert check_times(read_folder(tmp_path)).verdict == "warn"


def test_own_name_is_looked_up() -> None:
    assert isinstance(resolve(socket.gethostname()), tuple)
