"""Files of `samestep submit` as a function of recipe and resources."""

import subprocess
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import yaml

from samestep.errors import InputError
from samestep.tools.submit import Job, kubernetes_submission, slurm_submission

JOB = Job(
    subject="digits",
    text="batch_size: 64\n# \U0001f600\n",
    parameters=("epochs=1", "optimizer.options.lr=0.05"),
    name="first",
    nodes=4,
    gpus=2,
    minimum=8,
    maximum=8,
    runs="/home/me/my work/all runs",
    folder="/home/me/my work",
    python="/opt/python",
    image="registry/samestep:1",
    volume="claim",
)
ELASTIC = replace(JOB, minimum=4)
SCRIPT = replace(JOB, subject="my train.py", parameters=("--epochs", "2"), gpus=0)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ").strip("'") for line in script.splitlines() if line.startswith("#SBATCH ")]


def documents(job: Job) -> list[Any]:
    return list(yaml.safe_load_all(kubernetes_submission(job).text))


def test_slurm_script() -> None:
    submission = slurm_submission(replace(JOB, time="2:00:00"))
    subprocess.run(["bash", "-n"], input=submission.text, text=True, check=True)
    assert submission.command == ("sbatch", "first.sbatch")
    assert directives(submission.text) == [
        "--job-name=first",
        "--chdir=/home/me/my work",
        "--nodes=4-4",
        "--mincpus=2",
        "--gpus-per-node=2",
        "--time=2:00:00",
        "--signal=USR1@120",
        "--requeue",
        "--open-mode=append",
        "--output=first-%j.out",
    ]
    assert submission.text.splitlines()[-2:] == [
        "exec srun --ntasks=$((SLURM_JOB_NUM_NODES * 2)) --ntasks-per-node=2 --kill-on-bad-exit=1 \\",
        "    /opt/python -m samestep train digits epochs=1 optimizer.options.lr=0.05 "
        "--name first --runs '/home/me/my work/all runs' --or-resume --requeue",
    ]
    assert "export SAMESTEP_TOKEN" in submission.text


def test_shared_folder_check_ends_a_job(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = slurm_submission(replace(JOB, runs=str(tmp_path / "runs"))).text
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/sh\nexit 1\n")  # a node that does not see the file
    (programs / "srun").chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(tmp_path / "runs") in done.stderr
    assert not list((tmp_path / "runs").iterdir())


def test_job_set() -> None:
    config_map, job_set = documents(ELASTIC)
    assert config_map["data"] == {"recipe.yaml": JOB.text}
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert "--nnodes=2:4" in container["command"]
    assert "--rdzv-endpoint=first-node-0-0.first:29400" in container["command"]
    assert "/samestep/recipe.yaml" in container["command"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 3)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    config_map, job_set = documents(SCRIPT)
    assert list(config_map["data"]) == ["train.py"]
    (container,) = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["/samestep/train.py", "--epochs", "2"]


def is_known(job_set: dict[str, Any]) -> bool:
    """Whether Kubeflow's models read a JobSet and write it again: they drop unknown keys."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    try:
        return bool(models.JobsetV1alpha2JobSet.from_dict(deepcopy(job_set)).to_dict() == job_set)
    except ValueError:  # a required key is missing
        return False


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every key of a mapping with fixed keys."""
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in places(item, (*path, index))]
    if not isinstance(value, dict):
        return []
    own = [] if path[-1:] == ("limits",) else [(*path, key) for key in value]
    return own + [place for key, item in value.items() for place in places(item, (*path, key))]


def misspelt(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy with another letter in one key."""
    copy = deepcopy(value)
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[f"{path[-1]}x"] = parent.pop(path[-1])
    return copy


def test_keys_of_the_job_set_are_known() -> None:
    for job in (JOB, ELASTIC, SCRIPT, replace(JOB, gpus=0, minimum=4, maximum=4)):
        assert is_known(documents(job)[-1])
    job_set = documents(JOB)[-1]
    paths = places(job_set)
    assert len(paths) > 25
    assert [path for path in paths if is_known(misspelt(job_set, path))] == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"maximum": 7, "minimum": 7}, "E_PROCESSES"),  # not the same number on each node
        ({"maximum": 3, "minimum": 3}, "E_PROCESSES"),  # a node without ranks
        ({"maximum": 16, "minimum": 16}, "E_PROCESSES"),  # more ranks than GPUs
        ({"minimum": 12}, "E_PROCESSES"),  # MIN > MAX
        ({"minimum": 3}, "E_PROCESSES"),  # half a node
        ({"name": "$(reboot)"}, "E_VALUE"),
        ({"name": "1st"}, "E_VALUE"),
        ({"name": "a" * 41}, "E_VALUE"),
        ({"image": None}, "E_OPTION_CONFLICT"),
        ({"volume": None}, "E_OPTION_CONFLICT"),
    ],
)
def test_jobs_that_kubernetes_cannot_run(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        kubernetes_submission(replace(JOB, **changes))
    assert caught.value.code == code
