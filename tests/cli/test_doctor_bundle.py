"""Tests of `samestep doctor --bundle`: complete findings without private data."""

import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.doctor_faults import RANK, bare, require
from helpers.system import COMMAND
from samestep.cli.main import main
from samestep.tools.doctor.bundle import Redaction, is_public, public_variables, read_redaction

# In the environment, and in names of folders, of the machine and of the user.
SECRETS = {
    "user": "zaphodb",
    "machine": "magrathea-42",
    "project": "heart-of-gold",
    "token": "hf_AbCdEfGh0123456789IjKlMnOpQrStUv",
    "key": "AKIAIOSFODNN7EXAMPLE",
    "password": "towel forty two!",
    "short": "pw-4x",
    "address": "10.21.32.43",
    "address 6": "fd12:3456:789a::17",
    "job": "submit-node-7.cluster.example",
}


def contents(bundle: Path) -> dict[str, str]:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def secret_variables(folder: Path) -> dict[str, str]:
    """Variables with secrets; the report shows the values of some."""
    return {
        **RANK,
        "HOME": str(folder / SECRETS["user"]),
        "USER": SECRETS["user"],
        "LOGNAME": SECRETS["user"],
        "HF_TOKEN": SECRETS["token"],
        "AWS_ACCESS_KEY_ID": SECRETS["key"],
        "DATABASE_URL": f"postgres://{SECRETS['user']}:{SECRETS['password']}@{SECRETS['address']}/db",
        "SAMESTEP_TOKEN": SECRETS["password"],
        "WIFI": SECRETS["short"],
        "MASTER_ADDR": f"{SECRETS['job']}.invalid",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": SECRETS["short"],
        "NCCL_DEBUG": SECRETS["key"],
        "ONEDNN_MAX_CPU_ISA": SECRETS["token"],
        "CUDA_VISIBLE_DEVICES": f"{SECRETS['key']},{SECRETS['key']}",
        "NVIDIA_TF32_OVERRIDE": f"{SECRETS['address']} {SECRETS['address 6']}",
        "OMP_NUM_THREADS": SECRETS["password"],
        "COLUMNS": "200",
    }


def test_bundle_contains_no_secret(tmp_path: Path) -> None:
    require("--uts")
    runs = tmp_path / SECRETS["user"] / SECRETS["project"]
    runs.mkdir(parents=True)
    (runs / "runs").write_text("")  # the failure shows the folder's name
    shell = f'hostname {SECRETS["machine"]}; exec "$@"'
    command = [*COMMAND, "doctor", "--quick", "--runs", str(runs / "runs"), "--bundle", "report.zip"]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--uts", "sh", "-ec", shell, "sh", *command],
        env=bare(tmp_path, secret_variables(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    shown = done.stdout.lower()
    for name in ("machine", "job", "token", "short", "project"):
        assert SECRETS[name].lower()[:8] in shown, "the printed report shows it"
    files = contents(tmp_path / "report.zip")
    assert set(files) == {"README.txt", "findings.json", "facts.json"}
    for name, text in files.items():
        for kind, secret in SECRETS.items():
            assert secret.lower() not in text.lower(), f"{kind} is in {name}"
        for part in (str(tmp_path), tmp_path.name, "towel", "/root", "postgres"):
            assert part not in text, f"{part} is in {name}"
    findings = {finding["name"]: finding for finding in json.loads(files["findings.json"])}
    assert findings["host name"]["value"] == "<host> does not resolve"
    assert findings["CUDA_VISIBLE_DEVICES"]["verdict"] == "fail"
    facts = json.loads(files["facts.json"])
    assert facts["variables"]["RANK"] == "0"
    assert facts["variables"]["NCCL_DEBUG"] == facts["variables"]["MASTER_ADDR"] == "<is set>"
    assert facts["versions"]["installed"]["torch"]
    assert "HF_TOKEN" not in files["facts.json"]


@pytest.mark.slow
def test_bundle_contains_the_error_of_ranks_without_paths(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "doctor", "--processes", "2", "--workers", "0", "--bundle", "report.zip"],
        env=bare(tmp_path, {"GLOO_SOCKET_IFNAME": "nosuch0"}),
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 3
    error = json.loads(contents(tmp_path / "report.zip")["facts.json"])["self_test"]["error"]
    assert "Unable to find address" in error
    assert "<path>" in error
    assert str(Path(__file__).parents[2]) not in error


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("see /home/user/run.py:12 main", "see <path>:12 main"),
        ("/dev/shm and /proc/self", "/dev/shm and /proc/self"),
        ("~/work/x.yaml", "<path>"),
        ("at 10.1.2.3:29500", "at <address>:29500"),
        ("at fe80::1 now", "at <address> now"),
        ("at 127.0.0.1 and ::1", "at 127.0.0.1 and ::1"),
        ("torch 2.13.0+cpu, driver 550.54.15", "torch 2.13.0+cpu, driver 550.54.15"),
        ("at 12:30:59", "at 12:30:59"),
        ("key ghp_0123456789abcdefghijABCDEFGHIJ", "key <token>"),
        ("GPU-12345678-9abc-def0-1234-56789abcdef0", "<token>"),
        ("SLURM_STEP_TASKS_PER_NODE is 2(x3)", "SLURM_STEP_TASKS_PER_NODE is 2(x3)"),
        ("NVIDIA_TF32_OVERRIDE is 0", "NVIDIA_TF32_OVERRIDE is 0"),
        ("process 4242 of Bob, not bobby", "process 4242 of <user>, not bobby"),
    ],
)
def test_redaction(text: str, redacted: str) -> None:
    redaction = Redaction((("bob", "<user>"),))
    assert redaction.apply({"a": [text, 1]}) == {"a": [redacted, 1]}


def test_public_values_of_variables() -> None:
    assert is_public("OMP_NUM_THREADS", "8,2")
    assert is_public("NCCL_DEBUG", "INFO")
    assert not is_public("NCCL_DEBUG", "hunter2")
    assert not is_public("LD_PRELOAD", "1")
    assert public_variables({"RANK": "1", "NCCL_TOPO_FILE": "x"}) == {"RANK": "1", "NCCL_TOPO_FILE": "<is set>"}


def test_extra_private_words() -> None:
    redaction = read_redaction([("secret-lab", "<lab>"), ("", "<nothing>")])
    assert redaction.apply("in secret-lab") == "in <lab>"
    assert replace(redaction, words=()).apply("in secret-lab") == "in secret-lab"


def test_bundle_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--bundle", str(tmp_path / "no" / "report.zip")]) == 2
    assert "--bundle report.zip" in capsys.readouterr().err
