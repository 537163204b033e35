"""NVIDIA's driver and GPUs, as its own command shows them, without torch and without touching a device.

Not run on hardware yet: what `nvidia-smi` prints is tested as text.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
_NUMBER = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_PATIENCE_SECONDS = 20.0
_FIELDS = "uuid,name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.current"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Card:
    """One GPU of the machine.

    Attributes:
        total: its memory in bytes.
        used: what is taken of it.
        generation: of PCI Express; None where the driver does not say.
        lanes: of PCI Express; None where the driver does not say.
    """

    uuid: str
    name: str
    total: int
    used: int
    generation: int | None = None
    lanes: int | None = None


@dataclass(frozen=True)
class Tenant:
    """A process that holds memory of a GPU."""

    process: int
    uuid: str
    used: int


@dataclass(frozen=True)
class Nvidia:
    """What the driver says.

    Attributes:
        driver: its version; None where there is none.
        links: how cards are connected, by positions: `NV4`, `PIX`, `SYS`, as `nvidia-smi topo -m` has it.
        failed: why nvidia-smi gave no answer, where it is there.
    """

    driver: str | None = None
    cards: tuple[Card, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    failed: str | None = None


def read_nvidia() -> Nvidia:
    """Ask the driver; nothing where there is none."""
    kernel = _NUMBER.search(_KERNEL_DRIVER.read_text(encoding="utf-8")) if _KERNEL_DRIVER.is_file() else None
    driver, command = kernel[1] if kernel else None, shutil.which("nvidia-smi")
    if command is None:
        return Nvidia(driver)
    asked = _ask(command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if asked.returncode != 0:
        return Nvidia(driver, failed=(asked.stdout + asked.stderr).strip() or f"exit code {asked.returncode}")
    found, cards = cards_of(asked.stdout)
    tenants = _ask(command, "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
    links = _ask(command, "topo", "-m") if len(cards) > 1 else None
    return Nvidia(
        driver=driver or found,
        cards=cards,
        tenants=tenants_of(tenants.stdout) if tenants.returncode == 0 else (),
        links=links_of(links.stdout, len(cards)) if links is not None and links.returncode == 0 else (),
    )


def _ask(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess([command, *arguments], 1, "", str(error))


def cards_of(text: str) -> tuple[str | None, tuple[Card, ...]]:
    """The driver and the cards in an answer to `--query-gpu`."""
    rows = _rows(text, 7)
    cards = tuple(
        Card(uuid, name, _mib(total), _mib(used), _whole(generation), _whole(lanes))
        for uuid, name, _, total, used, generation, lanes in rows
    )
    return (rows[0][2] if rows else None), cards


def tenants_of(text: str) -> tuple[Tenant, ...]:
    """The processes in an answer to `--query-compute-apps`."""
    return tuple(
        Tenant(int(process), uuid, _mib(used)) for process, uuid, used in _rows(text, 3) if process.isdecimal()
    )


def links_of(text: str, count: int) -> tuple[tuple[str, ...], ...]:
    """The matrix in an answer to `topo -m`, of cards only; none where it cannot be read."""
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    rows = [tuple(line[1 : count + 1]) for line in lines if line and re.fullmatch(r"GPU\d+", line[0])]
    rows = [row for row in rows if row and "X" in row]  # the heading begins with GPU0 too
    return tuple(rows) if len(rows) == count and all(len(row) == count for row in rows) else ()


def _rows(text: str, width: int) -> list[Sequence[str]]:
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == width]


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0  # `[N/A]`


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
