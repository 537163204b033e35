"""Files of `samestep submit` as a function of recipe and resources."""

import ast
import subprocess
from dataclasses import replace

import pytest
import yaml

from helpers.submitted_job import JOB
from samestep.errors import InputError
from samestep.tools.submit import dstack, kubernetes, ray, skypilot, slurm
from samestep.tools.submit.job import Job, Submission

RECIPE = replace(JOB, subject="recipes/mine.yaml", text="batch_size: 64\n")
ELASTIC = replace(JOB, minimum=4)


def only_file(submission: Submission) -> str:
    (text,) = submission.files.values()
    return text


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ").strip("'") for line in script.splitlines() if line.startswith("#SBATCH ")]


def checked_by_bash(script: str) -> str:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    return script


def test_slurm_script() -> None:
    submission = slurm.submission(replace(JOB, time="2:00:00"))
    script = checked_by_bash(only_file(submission))
    assert submission.command == ("sbatch", "first.sbatch")
    assert directives(script) == [
        "--job-name=first",
        "--chdir=/home/me/my work",
        "--nodes=4",
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
        "    /opt/python -m samestep train digits --set epochs=1 optimizer.options.lr=0.05 "
        "--name first --runs '/home/me/my work/all runs' --or-resume --requeue",
    ]
    assert "export SAMESTEP_TOKEN" in script


@pytest.mark.parametrize("time", ["30", "30:00", "2:00:00", "1-0", "1-12:30", "1-12:30:00", "0"])
def test_times_of_slurm(time: str) -> None:
    assert f"--time={time}" in directives(only_file(slurm.submission(replace(JOB, time=time))))


@pytest.mark.parametrize("time", ["abc", "", "2h", "1:2:3:4", "1-2-3", "-5", "1-", ":30", "30\n", "\u0663"])
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(InputError, match="E_VALUE"):
        slurm.submission(replace(JOB, time=time))


def test_slurm_script_of_an_elastic_job_and_of_a_script() -> None:
    assert "--nodes=2-4" in directives(only_file(slurm.submission(ELASTIC)))
    script = replace(JOB, subject="my train.py", text="", arguments=("--epochs", "2"), gpus=0)
    text = checked_by_bash(only_file(slurm.submission(script)))
    assert text.splitlines()[-1] == "    /opt/python 'my train.py' --epochs 2"
    assert not any(line.startswith("--gpus") for line in directives(text))


def test_shared_folder_check_ends_a_job(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = only_file(slurm.submission(replace(JOB, folder=str(tmp_path), runs="runs")))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text("#!/bin/sh\nexit 1\n")  # a node that does not see the file
    (programs / "srun").chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(tmp_path / "runs") in done.stderr
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("job", "workers"), [(JOB, 8), (ELASTIC, (4, 8))])
def test_ray_script(job: Job, workers: object) -> None:
    submission = ray.submission(job)
    tree = ast.parse(only_file(submission))
    values = {
        keyword.arg: ast.literal_eval(keyword.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if not isinstance(keyword.value, ast.Call)
    }
    assert values["num_workers"] == workers
    assert values["use_gpu"] is True
    assert values["max_failures"] == 3
    # Ray writes its own files next to the runs, not into the run.
    assert values["storage_path"] == "/home/me/my work/all runs/.ray"
    assert values["train_loop_config"]["arguments"][:4] == ["-m", "samestep", "train", "digits"]
    assert submission.command[-2:] == ("python", "/home/me/my work/first.ray.py")


def test_recipe_travels_with_the_job() -> None:
    config_map, train_job = yaml.safe_load_all(only_file(kubernetes.submission(RECIPE, "trainjob")))
    assert config_map["data"] == {"mine.yaml": "batch_size: 64\n"}
    assert "/samestep/mine.yaml" in train_job["spec"]["trainer"]["command"]
    task = yaml.safe_load(only_file(skypilot.submission(RECIPE)))
    assert task["file_mounts"] == {"/samestep/mine.yaml": "/home/me/my work/recipes/mine.yaml"}
    assert "-m samestep train /samestep/mine.yaml" in task["run"]
    checked_by_bash(task["run"])
    task = yaml.safe_load(only_file(dstack.submission(RECIPE)))
    assert task["files"] == ["/home/me/my work/recipes/mine.yaml:/samestep/mine.yaml"]
    checked_by_bash("\n".join(task["commands"]))


def test_an_elastic_job_of_kubernetes_waits_for_fewer_nodes() -> None:
    (job_set,) = yaml.safe_load_all(only_file(kubernetes.submission(ELASTIC, "jobset")))
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert "--nnodes=2:4" in container["command"]
    assert "--rdzv-endpoint=first-node-0-0.first:29400" in container["command"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 3)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}


def test_files_do_not_depend_on_anything_else() -> None:
    assert slurm.submission(JOB) == slurm.submission(JOB)
    assert kubernetes.submission(RECIPE, "jobset") == kubernetes.submission(RECIPE, "jobset")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"maximum": 7, "minimum": 7}, "E_PROCESSES"),  # not the same number on each node
        ({"maximum": 3, "minimum": 3}, "E_PROCESSES"),  # a node without ranks
        ({"maximum": 16, "minimum": 16}, "E_PROCESSES"),  # more ranks than GPUs
        ({"minimum": 12}, "E_PROCESSES"),  # MIN > MAX
        ({"name": "a b"}, "E_VALUE"),
        ({"name": "$(reboot)"}, "E_VALUE"),
    ],
)
def test_invalid_jobs(changes: dict[str, object], code: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(JOB, **changes)  # type: ignore[arg-type]
    assert caught.value.code == code


def test_jobs_that_a_system_cannot_run() -> None:
    refused = [
        (lambda: slurm.submission(replace(JOB, minimum=3)), "E_PROCESSES"),  # half a node
        (lambda: skypilot.submission(ELASTIC), "E_PROCESSES"),
        (lambda: dstack.submission(ELASTIC), "E_PROCESSES"),
        (lambda: kubernetes.submission(replace(JOB, image=None), "jobset"), "E_OPTION_CONFLICT"),
        (lambda: kubernetes.submission(replace(JOB, volume=None), "jobset"), "E_OPTION_CONFLICT"),
        (lambda: kubernetes.submission(replace(JOB, name="1st"), "jobset"), "E_VALUE"),
        (lambda: skypilot.submission(replace(JOB, gpu_name=None)), "E_OPTION_CONFLICT"),
    ]
    for call, code in refused:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == code
