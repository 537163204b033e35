"""Several hosts on one machine: namespaces with cables to one bridge, host names, and temporary files of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.surroundings import require_bounded
from helpers.system import IMPORT_PATH, TESTS, Done, Running, events, here, until, weights
from samestep.distributed.env import RANK_VARIABLES

PORT = 29400  # no other process uses ports of these namespaces
RECIPE = TESTS / "helpers/recorded.yaml"
HANG_SECONDS = 8
END_SECONDS = 40  # limit of hangs, reports of silent ranks, and the end of torchrun
# gloo uses the interface of the host's name, which has no address here.
INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}


@dataclass(frozen=True)
class Host:
    """One simulated host."""

    name: str  # host name
    namespace: str  # of the network
    cable: str  # end of its cable at the bridge
    address: str

    def prefix(self, *, clock_offset: int = 0) -> list[str]:
        """Return the start of a command on this host, with its monotonic clock ahead by some seconds."""
        clock = ["--time", f"--monotonic={clock_offset}", f"--boottime={clock_offset}"] if clock_offset else []
        name = ["bash", "-c", 'hostname "$0"; mount -t tmpfs none /var/tmp; exec "$@"', self.name]
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *clock]
        return ["ip", "netns", "exec", self.namespace, *own, *name]

    def cut(self) -> None:
        """Pull the cable: no message arrives, and none of the connections ends."""
        _ip("link", "set", self.cable, "down")

    def slow(self, rate: str) -> None:
        """Limit the traffic that the host sends to a rate, such as `2mbit`, by a token bucket."""
        bucket = ("rate", rate, "burst", "32kbit", "latency", "2s")
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket], check=True)

    def run(
        self, *command: object, cwd: Path, variables: Mapping[str, str] | None = None, clock_offset: int = 0
    ) -> Running:
        """Start a command on this host, without the variables of other launchers."""
        bare = [f"--unset={name}" for name in (*RANK_VARIABLES, "SAMESTEP_TOKEN", *INTERFACE)]
        # The sockets of one host must not be in a folder of another.
        own = {"TMPDIR": "/var/tmp", "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}
        own |= variables or {}
        environment = ["env", *bare, *(f"{name}={value}" for name, value in own.items())]
        return Running(*command, cwd=cwd, command=[*self.prefix(clock_offset=clock_offset), *environment])


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Yield hosts that reach one another through a bridge; they are removed after the block."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("only root may add network namespaces, with ip and unshare")
    mark = f"{os.getpid() % 100_000:05d}"
    probe = subprocess.run(["ip", "netns", "add", f"probe{mark}"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"ip netns add: {probe.stderr.strip()}")
    _ip("netns", "delete", f"probe{mark}")
    with ExitStack() as stack:
        bridge = f"ssb{mark}"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        machines = [
            Host(f"h{number}", f"ss{mark}h{number}", f"ssv{mark}{number}", f"10.83.0.{number + 1}")
            for number in range(count)
        ]
        for host in machines:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            stack.callback(_ip, "link", "delete", host.cable)  # unsent data would keep cable and namespace for minutes
            _ip("link", "set", host.cable, "master", bridge, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", link, "up")
        yield machines


def by_torchrun(
    machines: Sequence[Host],
    stack: ExitStack,
    path: Path,
    *command: object,
    ranks: int = 1,
    minimum: int = 0,
    restarts: int = 0,
) -> list[Running]:
    """Start torchrun on each host, for `ranks` ranks; the first host has the store.

    With a `minimum` of hosts, torchrun restarts the ranks of fewer hosts, in seconds.
    """
    nodes, waits = len(machines), ",last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        stack.enter_context(
            host.run(
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={minimum or nodes}:{nodes}"),
                *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=1"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={machines[0].address}:{PORT}", "--rdzv-id=samestep"),
                f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}{waits if minimum else ''}",
                f"--local-addr={host.address}",
                *command,
                cwd=path,
                variables=INTERFACE,
            )
        )
        for number, host in enumerate(machines)
    ]


def by_hand(machines: Sequence[Host], number: int) -> dict[str, str]:
    """Return the variables of the only rank of host `number`, without an agent; rank 0 has the store."""
    return {
        **INTERFACE,
        "RANK": str(number),
        "WORLD_SIZE": str(len(machines)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": str(PORT),
    }


def by_variables(
    machines: Sequence[Host],
    stack: ExitStack,
    path: Path,
    *command: object,
    python_path: str = IMPORT_PATH,
    token: str = "token",
    clock_offset: int = 0,
) -> list[Running]:
    """Start one rank per host by variables alone, without an agent; path, token and clocks are those of other hosts."""
    commands = []
    for number, host in enumerate(machines):
        own = {"PYTHONPATH": python_path, "SAMESTEP_TOKEN": token} if number else {"SAMESTEP_TOKEN": "token"}
        variables = {**by_hand(machines, number), **own}
        offset = clock_offset if number else 0
        running = host.run(sys.executable, *command, cwd=path, variables=variables, clock_offset=offset)
        commands.append(stack.enter_context(running))
    return commands


def ended(commands: Sequence[Running], seconds: float = END_SECONDS) -> list[Done]:
    """Return the results of commands that must end within some seconds and leave no process."""
    deadline = time.monotonic() + seconds
    results = [command.wait(max(1.0, deadline - time.monotonic())) for command in commands]
    for command in commands:
        until(lambda command=command: not command.processes(), "no process is left", 10, command.processes)
    return results


def single_report(results: Sequence[Done]) -> str:
    """Return the only report of all ranks."""
    reports = [result.err for result in results if "error: " in result.err]
    assert len(reports) == 1, results
    require_bounded(reports[0])
    assert reports[0].count("error: ") == 1, reports[0]
    return reports[0]


def kill_host(machine: Host, commands: Running) -> None:
    """End all processes of a host as a loss of power does: its kernel ends no connection."""
    machine.cut()
    for process in commands.processes():
        commands.try_kill_process(process, signal.SIGKILL)


def held_run(machines: Sequence[Host], stack: ExitStack, path: Path, *options: object) -> list[Running]:
    """Start a run whose rank 0 waits in call 20 of the loss, after the checkpoint of step 3."""
    (path / "hold").write_text("0 20", encoding="utf-8")
    command = ("-m", "samestep", "train", RECIPE, *options, "--name", "many", "--checkpoint-every", 3)
    commands = by_variables(machines, stack, path, *command, "--hang-after", f"{HANG_SECONDS}s")
    # The hold must be shorter than the time that counts as a hang.
    commands[0].until(lambda: len(events(path / "runs/many", "step")) >= 6, "6 steps")
    return commands


def require_resumable(path: Path) -> None:
    """Require that one process resumes the run to the weights of an undisturbed run."""
    (path / "hold").unlink(missing_ok=True)
    assert here("resume", path / "runs/many", cwd=path) == 0
    assert here("train", RECIPE, "--name", "one", cwd=path) == 0
    assert weights(path / "runs/many") == weights(path / "runs/one")


def require_trained(results: Sequence[Done], path: Path, ranks: int, undisturbed: tuple[str, str]) -> None:
    """Require that all commands have ended with a run of this number of ranks and with the undisturbed weights."""
    assert [result.code for result in results] == [0] * len(results), results
    (environment,) = json.loads((path / "runs/many/environment.json").read_text(encoding="utf-8"))
    assert environment["processes"] == ranks
    assert weights(path / "runs/many") == undisturbed


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
