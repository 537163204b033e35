"""Nodes of a Ray cluster join and leave a run at random moments: it continues on 1 to 3 workers to the same weights."""

import importlib.util
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.job_examples import job_examples
from helpers.resizes import MOST, moves, rank_counts, recipe, require_undisturbed
from helpers.started import free_port
from helpers.surroundings import RecordFault
from helpers.system import IMPORT_PATH, Running, environment, events, until
from samestep.launcher.rendezvous import accepts_connections

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (samestep[ray])")

SECONDS = 180
DRAIN_SECONDS = 600
RESIZES, EPOCHS = 20, 40  # about 20 minutes
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": IMPORT_PATH,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
RAY = str(Path(sys.executable).with_name("ray"))


class Node(Running):
    """Node of a Ray cluster with one core, on this machine.

    Args:
        path: folder of the command.
        address: of the cluster.
        options: options of `ray start`.
    """

    def __init__(self, path: Path, address: str, *options: str) -> None:
        self.id = secrets.token_hex(28)
        self._address = address
        super().__init__(
            *("start", "--block", "--num-cpus=1", "--object-store-memory=80000000", *options),
            cwd=path,
            variables={**VARIABLES, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": self.id},
            command=[RAY],
        )

    def drain(self) -> None:
        """Send the notice of a preemption."""
        command = [RAY, "drain-node", f"--address={self._address}", f"--node-id={self.id}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        command += [f"--deadline-remaining-seconds={DRAIN_SECONDS}"]
        subprocess.run(command, env=environment() | VARIABLES, check=True, capture_output=True)

    def lose(self) -> None:
        """Kill all processes of the node."""
        while processes := self.processes():
            for process in processes:
                self.try_kill_process(process, signal.SIGKILL)


def documented_script(path: Path) -> str:
    """Write the script of the guide to submission, with changes for many fast resizes; return its name."""
    name, text = "first.ray.py", job_examples()["first.ray.py"]
    subject = shlex.join(recipe(EPOCHS))
    for before, after in (
        ("digits epochs=2 --name first", f"{subject} --name many"),
        ("--max-lost-work 5m", "--checkpoint-every 5"),  # Ray kills the workers when one joins
        ("/shared", str(path)),
        ("(2, 3)", f"(1, {MOST})"),
        ("max_failures=3", "max_failures=-1"),
        ("use_gpu=False", "use_gpu=False, elastic_resize_monitor_interval_s=2"),
    ):
        assert before in text
        text = text.replace(before, after)
    (path / name).write_text(text, encoding="utf-8")
    return name


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_resizes(tmp_path: Path, record_fault: RecordFault) -> None:
    """Nodes join, are killed, or are drained before they are killed."""
    script, run, port = documented_script(tmp_path), tmp_path / "runs/many", free_port()
    address, marker = f"127.0.0.1:{port}", tmp_path / "slow"
    marker.touch()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp"))  # for paths of sockets
        first = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        stack.enter_context(Node(tmp_path, address, *first))
        until(lambda: accepts_connections("127.0.0.1", port), "the head of the cluster", SECONDS)
        others = list[Node]()
        variables = {**VARIABLES, "RAY_ADDRESS": address}
        running = stack.enter_context(Running(script, cwd=tmp_path, command=[sys.executable], variables=variables))
        for move, place, size in moves(RESIZES, ["kill", "drain"]):
            steps = len(events(run, "step")) + 3
            running.until(lambda steps=steps: len(events(run, "step")) >= steps, "progress", SECONDS)
            if move == "join":
                others.append(stack.enter_context(Node(tmp_path, address, f"--address={address}")))
            else:
                node = others.pop(place - 1)
                if move == "drain":
                    stops = len(events(run, "stop"))
                    node.drain()
                    running.until(lambda stops=stops: len(events(run, "stop")) > stops, "a checkpoint", SECONDS)
                node.lose()
            running.until(lambda size=size: rank_counts(run)[-1] == size, f"{size} workers", SECONDS)
        marker.unlink()
        done = running.wait(600)
    assert done.code == 0, done
    assert set(rank_counts(run)) == {1, 2, 3}
    require_undisturbed(tmp_path, EPOCHS)
    fault = (
        f"{RESIZES} times a node of a Ray cluster joins, is killed, or is drained for a preemption, `--processes 1:3`"
    )
    record_fault(fault, "exit code 0; the same weights")
