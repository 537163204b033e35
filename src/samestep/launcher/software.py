"""Comparison of the software of all ranks before training: other versions on a host could change results unnoticed."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from samestep.distributed.rendezvous import wait_for_keys
from samestep.distributed.status import ranks_text
from samestep.errors import InputError, RunError
from samestep.report_limits import printable

_MAX_NAMED = 5  # groups of ranks in one error


def require_same_software(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Require the versions of Python, torch, NumPy and Samestep of rank 0 on all ranks. A collective operation.

    The version of Samestep is a SHA-256 of its source files, because a checkout keeps its number between releases.

    Args:
        store: of these ranks alone.
        rank: rank of this process.
        size: number of ranks.
        timeout: limit of the time until all ranks have sent their versions.

    Raises:
        InputError: the software of a rank differs from that of rank 0; on all ranks, with hosts and ranks.
        RunError: a rank sent nothing within `timeout`.
    """
    if size == 1:
        return
    store = dist.PrefixStore("software", store)
    store.set(str(rank), json.dumps([socket.gethostname(), _versions()]))
    if rank == 0:
        keys = [str(number) for number in range(size)]
        _wait(store, keys, timeout)
        store.set("differences", json.dumps(_differences([json.loads(row) for row in store.multi_get(keys)])))
    _wait(store, ["differences"], timeout)
    differences = json.loads(store.get("differences"))
    if differences:
        raise InputError(
            "\n    ".join(["ranks run other software than rank 0", *map(printable, differences)]),
            expected="the same versions of Python, torch, NumPy and Samestep on all hosts, because they decide results",
            fix="install the versions of rank 0 on the other hosts",
            code="E_SOFTWARE_DIFFERS",
        )


@cache
def _versions() -> dict[str, str]:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__,
        "NumPy": numpy.__version__,
        "Samestep": f"source {digest.hexdigest()[:12]}",
    }


def _differences(rows: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return one line per host and library with another version than rank 0; the last line counts further ones."""
    main_host, main = rows[0]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, (host, versions) in enumerate(rows):
        for name, text in versions.items():
            if main.get(name) != text:
                groups.setdefault((host, name, text), []).append(rank)
    lines = [
        f"{ranks_text(ranks)} on host {host}: {name} {text}; rank 0 on host {main_host}: {name} {main.get(name)}"
        for (host, name, text), ranks in groups.items()
    ]
    return lines[:_MAX_NAMED] + ([f"and {len(lines) - _MAX_NAMED} more"] if len(lines) > _MAX_NAMED else [])


def _wait(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    if not wait_for_keys(store, keys, timeout.total_seconds()):
        raise RunError(
            f"the versions of all ranks did not arrive within {timeout.total_seconds():g} s",
            expected="every rank sends its versions at the start",
            fix="read the output of the other ranks",
            code="E_RENDEZVOUS",
        )
