"""Several hosts on one machine: namespaces with cables to one bridge, host names, and temporary files of their own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.system import TESTS, Running
from samestep.distributed.launcher_detection import LAUNCH_VARIABLES

SOURCES = TESTS.parent / "src"
PORT = 29400  # no other process uses ports of these namespaces


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
        """Limit what the host sends to a rate, such as `2mbit`, by a token bucket."""
        bucket = ("rate", rate, "burst", "32kbit", "latency", "2s")
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket], check=True)

    def run(
        self, *command: object, cwd: Path, variables: Mapping[str, str] | None = None, clock_offset: int = 0
    ) -> Running:
        """Start a command on this host, without the variables of other launchers."""
        bare = [f"--unset={name}" for name in (*LAUNCH_VARIABLES, "SAMESTEP_TOKEN")]
        path = os.pathsep.join(map(str, (SOURCES, TESTS)))
        # The sockets of one host must not be in a folder of another.
        own = {"TMPDIR": "/var/tmp", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
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


def torchrun(machines: Sequence[Host], number: int, ranks: int) -> list[str]:
    """Return the command of torchrun on host `number`, for `ranks` ranks on each host; the first host has the store."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(machines)}", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={machines[0].address}:{PORT}", "--rdzv-id=samestep"),
        f"--rdzv-conf=is_host={'true' if number == 0 else 'false'}",
        f"--local-addr={machines[number].address}",
    ]


def by_hand(machines: Sequence[Host], number: int) -> dict[str, str]:
    """Return the variables of the only rank of host `number`, without an agent; rank 0 has the store."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(len(machines)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": str(PORT),
    }


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
