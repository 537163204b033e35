"""Nodes of a Slurm cluster leave and return at random moments: a requeued job continues on 1 to 3 nodes."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.resizes import MOST, moves, rank_counts, recipe, require_undisturbed
from helpers.slurm import missing, slurm, slurm_cluster
from helpers.surroundings import RecordFault
from helpers.system import environment, events, here, until

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"Slurm {missing()}")

SECONDS = 120
REQUEUES, EPOCHS = 20, 12


def submit(path: Path, cluster: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Submit a job for 1 to 3 nodes of one rank, with frequent checkpoints."""
    job = ("--nodes", MOST, "--gpus", 0, "--processes", f"1:{MOST}", "--name", "many")
    assert here("submit", "slurm", *recipe(EPOCHS), *job, "--dry-run", "--json", cwd=path) == 0
    ((name, text),) = json.loads(capsys.readouterr().out)["files"].items()
    assert text.count(" --or-resume") == 1
    (path / name).write_text(text.replace(" --or-resume", " --or-resume --checkpoint-every 5"), encoding="utf-8")
    subprocess.run(["sbatch", name], cwd=path, env=environment() | cluster, check=True, capture_output=True)


def leave(node: str, way: str, cluster: Mapping[str, str]) -> None:
    """Let a node fail; or reserve it for maintenance, and requeue the job or let it requeue itself."""
    if way == "fails":
        slurm(cluster, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    # A node that is down returns when its daemon registers again, unless it is drained.
    slurm(cluster, "scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    if way == "requeued":
        slurm(cluster, "scontrol", "requeue", "1")
    elif way == "stops":
        slurm(cluster, "scancel", "--name=many", "--signal=USR1")  # as before the time limit


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_requeues(tmp_path: Path, capsys: pytest.CaptureFixture[str], record_fault: RecordFault) -> None:
    run, marker, folder = tmp_path / "runs/many", tmp_path / "slow", tmp_path / "slurm"
    folder.mkdir()
    marker.touch()

    def output() -> str:
        return "".join(file.read_text() for file in tmp_path.glob("*.out"))

    def job_state() -> str:
        return slurm(cluster, "squeue", "-h", "-o", "%T").strip()

    def node_state(node: str) -> str:
        return slurm(cluster, "sinfo", "-h", "-n", node, "-o", "%T").strip()

    with slurm_cluster(folder, MOST) as cluster:
        for number in range(1, MOST):
            slurm(cluster, "scontrol", "update", f"NodeName=n{number + 1}", "State=DRAIN", "Reason=test")
        submit(tmp_path, cluster, capsys)
        present, absent = ["n1"], [f"n{number + 1}" for number in range(1, MOST)]
        for way, place, size in moves(REQUEUES, ["fails", "requeued", "stops"]):
            steps = len(events(run, "step")) + 3
            until(lambda steps=steps: len(events(run, "step")) >= steps, "progress", SECONDS, output)
            if way == "join":
                present.append(absent.pop(0))
                node = present[-1]
                slurm(cluster, "scontrol", "update", f"NodeName={node}", "State=RESUME")
                until(lambda node=node: node_state(node) == "idle", f"the node {node}", SECONDS)
                slurm(cluster, "scontrol", "requeue", "1")
            else:
                absent.append(present.pop(place))
                leave(absent[-1], way, cluster)
            # Slurm starts a requeued job after two minutes, unless its start time is changed.
            until(lambda: job_state() == "PENDING", "a pending job", SECONDS, output)
            slurm(cluster, "scontrol", "update", "JobId=1", "StartTime=now")
            until(lambda size=size: rank_counts(run)[-1] == size, f"{size} ranks", SECONDS, output)
        marker.unlink()
        until(lambda: not job_state(), "the end of the job", 600, output)
    assert set(rank_counts(run)) == {1, 2, 3}, output()
    require_undisturbed(tmp_path, EPOCHS)
    fault = f"{REQUEUES} times a node of a Slurm job fails, is drained or returns, and the job is requeued, `1:3` ranks"
    record_fault(fault, "the same weights")
