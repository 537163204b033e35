"""Kubernetes: a TrainJob of Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1), or a JobSet (v1alpha2)."""

from __future__ import annotations

import re
from typing import Any, Literal

from samestep.errors import InputError
from samestep.tools.submit.job import RESTARTS, RUNS, SUBJECT_FOLDER, Job, Submission, to_yaml

Manifest = Literal["trainjob", "jobset"]
_GPU = "nvidia.com/gpu"
# Name of the replicated job and of its container in the runtime `torch-distributed` of Kubeflow Trainer.
_NODE = "node"
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
# A step and a checkpoint after SIGTERM.
_GRACE_SECONDS = 120


def submission(job: Job, manifest: Manifest) -> Submission:
    """Return a manifest, and the command that submits it.

    Raises:
        InputError: there is no image or no volume, or the name of the file is no key of a ConfigMap.
    """
    documents = [_config_map(job), (_train_job if manifest == "trainjob" else _job_set)(job)]
    name = f"{job.name}.{manifest}.yaml"
    text = to_yaml(*(document for document in documents if document is not None))
    return Submission({name: text}, ("kubectl", "apply", "-f", name), _notes(job))


def _config_map(job: Job) -> dict[str, Any] | None:
    """Return the recipe or script as an object of the cluster; None for a shipped recipe."""
    if job.text is None:
        return None
    if not _KEY.fullmatch(job.file_name):
        raise InputError(
            f"the name of the file is {job.file_name!r}",
            expected="a key of a ConfigMap: letters of ASCII, digits, hyphens, underscores and dots",
            fix="rename the file",
            code="E_VALUE",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.resource_name},
        "data": {job.file_name: job.text},
    }


def _train_job(job: Job) -> dict[str, Any]:
    pod = {"volumes": _volumes(job), "containers": [{"name": _NODE, "volumeMounts": _mounts(job)}]}
    job_patch = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "samestep.submit/cli",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job_patch]}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.resource_name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.require_image("kubernetes"),
                "numNodes": job.nodes,
                "numProcPerNode": job.per_node,
                "command": _command(job),
                **({"resourcesPerNode": _resources(job)} if job.gpus else {}),
            },
            "runtimePatches": [patch],
        },
    }


def _job_set(job: Job) -> dict[str, Any]:
    container = {
        "name": _NODE,
        "image": job.require_image("kubernetes"),
        "command": _command(job),
        "volumeMounts": _mounts(job),
        **({"resources": _resources(job)} if job.gpus else {}),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": _volumes(job),
    }
    # The spare attempts of an elastic job replace pods, while torchrun continues with the others.
    spare = RESTARTS if job.minimum != job.maximum else 0
    indexed = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": spare,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.resource_name},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": indexed}}],
        },
    }


def _command(job: Job) -> list[str]:
    # JobSet gives each pod this name: JOBSET-REPLICATEDJOB-REPLICA-INDEX.SUBDOMAIN
    host = f"{job.resource_name}-{_NODE}-0-0.{job.resource_name}"
    return job.torchrun(host)


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {_GPU: str(job.gpus)}}


def _volumes(job: Job) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.require_volume("kubernetes")}}
    ]
    if job.text is not None:
        volumes.append({"name": "subject", "configMap": {"name": job.resource_name}})
    return volumes


def _mounts(job: Job) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "runs", "mountPath": RUNS}]
    if job.text is not None:
        mounts.append({"name": "subject", "mountPath": SUBJECT_FOLDER})
    return mounts


def _notes(job: Job) -> tuple[str, ...]:
    return (
        f"the run is {RUNS}/{job.name} on the volume {job.volume}",
        "for Kueue: kubectl label --local -o yaml -f FILE kueue.x-k8s.io/queue-name=QUEUE | kubectl apply -f -",
    )
