"""`samestep submit`: file, command, errors, examples of the guide, and jobs with the bits of `samestep train`."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from helpers.hosts import by_torchrun, ended, hosts
from helpers.job_examples import job_examples
from helpers.slurm import missing, slurm, slurm_cluster, wait_until
from helpers.system import events, here, weights
from samestep.cli.main import build_parser

JOB = ("digits", "--nodes", 2, "--gpus", 0, "--name", "a")
Captured = pytest.CaptureFixture[str]

needs_slurm = pytest.mark.skipif(bool(missing()), reason=f"Slurm {missing()}")


def test_dry_run_writes_nothing(tmp_path: Path, capsys: Captured) -> None:
    assert here("submit", "slurm", *JOB, "--dry-run", "--json", cwd=tmp_path) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == ["sbatch", "a.sbatch"]
    assert result["submitted"] is False
    assert here("submit", "slurm", *JOB, "--dry-run", cwd=tmp_path) == 0
    assert capsys.readouterr().out == f"# a.sbatch\n{result['files']['a.sbatch']}\n# command\nsbatch a.sbatch\n"
    assert not list(tmp_path.iterdir())


def test_script_has_its_arguments(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.py").write_text("import samestep\n")
    job = ("train.py", *JOB[1:], "--dry-run", "--json", "--", "--epochs", 3)
    assert here("submit", "slurm", *job, cwd=tmp_path) == 0
    script = json.loads(capsys.readouterr().out)["files"]["a.sbatch"]
    assert script.endswith(" train.py --epochs 3\n")


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ").strip("'") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_batch_script(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    job = ("--nodes", 4, "--gpus", 2, "--processes", "4:8", "--time", "2:00:00", "--name", "first")
    options = ("--runs", "all runs", "--dry-run", "--json")
    assert here("submit", "slurm", "digits", "epochs=1", *job, *options, cwd=folder) == 0
    script = json.loads(capsys.readouterr().out)["files"]["first.sbatch"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert directives(script) == [
        "--job-name=first",
        f"--chdir={folder}",
        "--nodes=2-4",
        "--mincpus=2",
        "--gpus-per-node=2",
        "--time=2:00:00",
        "--signal=USR1@120",
        "--requeue",
        "--open-mode=append",
        "--output=first-%j.out",
    ]
    assert script.splitlines()[-2:] == [
        "exec srun --ntasks=$((SLURM_JOB_NUM_NODES * 2)) --ntasks-per-node=2 --kill-on-bad-exit=1 \\",
        f"    {sys.executable} -m samestep train digits epochs=1 "
        f"--name first --runs '{folder}/all runs' --or-resume --requeue",
    ]
    assert "export SAMESTEP_TOKEN" in script


def test_shared_folder_check_ends_a_job(tmp_path: Path, capsys: Captured) -> None:
    assert here("submit", "slurm", *JOB, "--dry-run", "--json", cwd=tmp_path) == 0
    script = json.loads(capsys.readouterr().out)["files"]["a.sbatch"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/sh\nexit 1\n")  # a node that does not see the file
    (programs / "srun").chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(tmp_path / "runs") in done.stderr
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("slurm", "digits", "--nodes", 0, "--gpus", 0), "E_VALUE"),
        (("slurm", "digits", "--nodes", 2, "--gpus", 0, "--processes", "4:2"), "E_PROCESSES"),
        (("slurm", "digits", "--nodes", 2, "--gpus", 0, "--processes", 3), "E_PROCESSES"),
        (("slurm", "digits", "--nodes", 2, "--gpus", 0, "--processes", "auto"), "E_PROCESSES"),
        (("slurm", "digits", "--nodes", 16, "--gpus", 1), "E_TOO_MANY_RANKS"),
        (("slurm", "missing.yaml", "--nodes", 2, "--gpus", 0), "E_FILE_MISSING"),
        (("slurm", "missing.py", "--nodes", 2, "--gpus", 0), "E_FILE_MISSING"),
        (("slurm", "digits", "--nodes", 4, "--gpus", 2, "--processes", "3:8"), "E_PROCESSES"),  # half a node
        (("slurm", "digits", "--nodes", 4, "--gpus", 2, "--processes", 3), "E_PROCESSES"),  # nodes without ranks
        (("slurm", "digits", "--nodes", 4, "--gpus", 2, "--processes", 16), "E_PROCESSES"),  # more ranks than GPUs
        (("slurm", "digits", "--nodes", 2, "--gpus", 0, "--name", "$(reboot)"), "E_VALUE"),
    ],
)
def test_invalid_input(refused: Callable[..., str], arguments: tuple[object, ...], code: str) -> None:
    assert f"[{code}]" in refused("submit", *arguments)


SUBMIT = ("submit", "slurm", *JOB)


def test_missing_and_failing_commands_keep_the_file(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):  # equal files are no conflict
        assert here(*SUBMIT, cwd=tmp_path) == 2
        assert "[E_NOT_INSTALLED]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.sbatch"]
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'no controller' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert here(*SUBMIT, cwd=tmp_path) == 1
    error = capsys.readouterr().err
    assert "[E_JOB]" in error
    assert "no controller" in error
    (tmp_path / "a.sbatch").write_text("own: work\n")
    assert here(*SUBMIT, cwd=tmp_path) == 2
    assert "[E_OUTPUT]" in capsys.readouterr().err
    assert (tmp_path / "a.sbatch").read_text() == "own: work\n"
    (tmp_path / "a.sbatch").unlink()
    (tmp_path / "a.sbatch").mkdir()
    assert here(*SUBMIT, cwd=tmp_path) == 2
    assert "[E_OUTPUT]" in capsys.readouterr().err


def test_examples_of_other_systems_train() -> None:
    """Every file can be read, and its command of Samestep is one that the parser accepts."""
    examples = job_examples()
    assert set(examples) == {"first.jobset.yaml", "first.sky.yaml", "first.dstack.yml", "first.sh"}
    pod = yaml.safe_load(examples["first.jobset.yaml"])["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    texts = [
        pod["spec"]["containers"][0]["args"][0],
        yaml.safe_load(examples["first.sky.yaml"])["run"],
        "\n".join(yaml.safe_load(examples["first.dstack.yml"])["commands"]),
        examples["first.sh"],
    ]
    for text in texts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        words = shlex.split(text, comments=True)
        command, *arguments = words[words.index("samestep") + 1 :]
        options = build_parser(command).parse_args(arguments)
        assert (command, options.name, options.or_resume) == ("train", "first", True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the SHA-256 of the weights of `samestep train` on one process."""
    folder = tmp_path_factory.mktemp("reference")
    assert here("train", "digits", "epochs=2", "--name", "a", cwd=folder) == 0
    return weights(folder / "runs/a")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def submit_to_slurm(folder: Path, cluster: Mapping[str, str], *options: object) -> None:
    command = [sys.executable, "-m", "samestep", "submit", "slurm", *map(str, (*JOB, "--processes", 4, *options))]
    subprocess.run(command, cwd=folder, env={**os.environ, **cluster}, check=True, capture_output=True)


def wait_for_slurm(folder: Path, cluster: Mapping[str, str]) -> str:
    wait_until(lambda: not slurm(cluster, "squeue", "-h").strip(), 150)
    return "".join(path.read_text() for path in folder.glob("*.out"))


@needs_slurm
@pytest.mark.long
def test_two_nodes_of_slurm_have_the_bits_of_one_process(
    tmp_path: Path, cluster: Mapping[str, str], reference: str
) -> None:
    submit_to_slurm(tmp_path, cluster, "epochs=2")
    output = wait_for_slurm(tmp_path, cluster)
    assert weights(tmp_path / "runs/a") == reference, output


@needs_slurm
@pytest.mark.long
def test_slurm_requeues_a_job_that_a_signal_stopped(tmp_path: Path, cluster: Mapping[str, str], reference: str) -> None:
    submit_to_slurm(tmp_path, cluster, "epochs=2")
    started = tmp_path / "runs/a/events.jsonl"
    wait_until(lambda: started.exists() and '"step": 3,' in started.read_text(), 90)
    slurm(cluster, "scancel", "--name=a", f"--signal={signal.SIGUSR1.name.removeprefix('SIG')}")
    wait_until(lambda: bool(events(tmp_path / "runs/a", "stop")), 60)
    # Slurm starts a requeued job after two minutes, unless its start time is changed.
    wait_until(lambda: slurm(cluster, "squeue", "-h", "-o", "%T") == "PENDING\n", 60)
    slurm(cluster, "scontrol", "update", "JobName=a", "StartTime=now")
    output = wait_for_slurm(tmp_path, cluster)
    assert events(tmp_path / "runs/a", "resume"), output
    assert weights(tmp_path / "runs/a") == reference, output


@pytest.mark.long
def test_torchrun_on_two_hosts_has_the_bits_of_one_process(tmp_path: Path, reference: str) -> None:
    train = ("-m", "samestep", "train", "digits", "epochs=2", "--name", "a")
    with hosts(2) as machines, ExitStack() as stack:
        results = ended(by_torchrun(machines, stack, tmp_path, *train, ranks=2), 120)
    assert [result.code for result in results] == [0, 0], results
    assert weights(tmp_path / "runs/a") == reference
    assert len(list((tmp_path / "runs/a/ranks").glob("*"))) == 4
