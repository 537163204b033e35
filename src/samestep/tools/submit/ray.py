"""Ray Train: a script with a DataParallelTrainer, for `ray job submit`."""

from __future__ import annotations

from pathlib import Path

from samestep.tools.submit.job import RESTARTS, Job, Submission


def submission(job: Job) -> Submission:
    """Return a script, and the command that submits it; all machines share the file system."""
    name = f"{job.name}.ray.py"
    command = ("ray", "job", "submit", "--", "python", str(Path(job.out, name)))
    return Submission({name: _script(job)}, command, (f"the machines of the cluster share the folder {job.folder}",))


def _script(job: Job) -> str:
    workers = str(job.maximum) if job.minimum == job.maximum else f"({job.minimum}, {job.maximum})"
    resources = '"GPU": 1' if job.gpus else '"CPU": 1'
    runs = Path(job.folder, job.runs)
    config = {"arguments": job.arguments_of(job.subject, str(runs)), "folder": job.folder}
    return f'''"""Ray Train: {job.minimum} to {job.maximum} ranks of the run {job.name}."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from samestep.integrations.ray import SamestepConfig, run_rank

trainer = DataParallelTrainer(
    run_rank,
    train_loop_config={config!r},
    backend_config=SamestepConfig(),
    scaling_config=ScalingConfig(num_workers={workers}, use_gpu={bool(job.gpus)}, resources_per_worker={{{resources}}}),
    run_config=RunConfig(
        name={job.name!r},
        storage_path={str(runs / ".ray")!r},
        failure_config=FailureConfig(max_failures={RESTARTS}, max_preemption_failures=-1),
    ),
)
trainer.fit()
'''
