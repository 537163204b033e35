"""Launcher with torchrun's variables: `python fork_ranks.py N SCRIPT ...` runs scripts one after another.

The ranks are forks of a process that has imported torch, which is faster than torchrun.
"""

import multiprocessing
import os
import runpy
import socket
import sys

import torch


def run(rank: int, size: int, port: int, script: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def launch(size: int, script: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, size, port, script)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"{script} failed")


if __name__ == "__main__":
    for script in sys.argv[2:]:
        launch(int(sys.argv[1]), script)
