"""Files of `samestep submit` read by the models, schemas and loaders of the systems: every key is known there."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import yaml

from helpers.submitted_job import JOB as SHIPPED
from samestep.tools.submit import dstack, kubernetes, skypilot
from samestep.tools.submit.job import Submission

JOB = replace(SHIPPED, subject="mine.yaml", text="batch_size: 64\n", arguments=())
JOBS = [JOB, replace(JOB, minimum=4), replace(JOB, gpus=0, minimum=4, maximum=4, subject="digits", text=None)]
MANIFESTS: tuple[kubernetes.Manifest, ...] = ("trainjob", "jobset")


def documents(submission: Submission) -> list[Any]:
    (text,) = submission.files.values()
    return list(yaml.safe_load_all(text))


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


def is_known(document: dict[str, Any]) -> bool:
    """Whether Kubeflow's models read the document and write it again: they drop unknown keys."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    kinds = {"TrainJob": models.TrainerV1alpha1TrainJob, "JobSet": models.JobsetV1alpha2JobSet}
    if document.get("kind") not in kinds:
        return False
    try:
        return bool(kinds[document["kind"]].from_dict(deepcopy(document)).to_dict() == document)
    except ValueError:  # a required key is missing
        return False


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_keys_of_manifests(manifest: kubernetes.Manifest) -> None:
    for job in JOBS:
        assert is_known(documents(kubernetes.submission(job, manifest))[-1])


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_every_misspelt_key_is_found(manifest: kubernetes.Manifest) -> None:
    document = documents(kubernetes.submission(JOB, manifest))[-1]
    assert is_known(document)
    paths = places(document)
    assert len(paths) > 25
    assert [path for path in paths if is_known(misspelt(document, path))] == []


def test_core_kinds_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (108 MB of schemas)")
    for job in JOBS:
        *config_maps, job_set = documents(kubernetes.submission(job, "jobset"))
        assert len(config_maps) == (job.text is not None)
        template = job_set["spec"]["replicatedJobs"][0]["template"]
        core = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "first"}, **template}
        for document in [*config_maps, core]:
            validate.validate(document, "1.31", strict=True)
        for path in [path for path in places(core) if path not in (("kind",), ("apiVersion",))]:
            with pytest.raises((validate.ValidationError, validate.SchemaNotFoundError)):
                validate.validate(misspelt(core, path), "1.31", strict=True)


def test_task_of_skypilot() -> None:
    sky = pytest.importorskip("sky", reason="needs skypilot")
    for job in (JOB, JOBS[2]):
        (task,) = documents(skypilot.submission(job))
        task.pop("file_mounts", None)  # its files must exist
        read = sky.Task.from_yaml_config(deepcopy(task))
        assert (read.name, read.num_nodes, read.run) == ("first", 4, task["run"])
        with pytest.raises(ValueError, match="num_nodess"):
            sky.Task.from_yaml_config({**task, "num_nodess": 4})


def test_task_of_dstack() -> None:
    configurations = pytest.importorskip("dstack._internal.core.models.configurations", reason="needs dstack")
    for job in (JOB, JOBS[2]):
        (task,) = documents(dstack.submission(job))
        read = configurations.parse_run_configuration(deepcopy(task))
        assert (read.name, read.nodes, read.commands) == ("first", 4, task["commands"])
        with pytest.raises(Exception, match="nodess"):  # the error class of dstack's private module
            configurations.parse_run_configuration({**task, "nodess": 4})
