"""Machines with limits, without a network or with a faulty file system, for commands in child processes."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from helpers.system import COMMAND, Running

SOURCE = Path(__file__).with_name("machine_faults.c")


def in_shell(setup: str, *, unshare: str = "") -> tuple[str, ...]:
    """Return the command `samestep` after shell commands, in new namespaces of these options of `unshare`."""
    namespaces = ("unshare", *unshare.split()) if unshare else ()
    if namespaces and not _can(*namespaces):
        pytest.skip(f"{' '.join(namespaces)} is not permitted")
    return (*namespaces, "bash", "-c", f'set -e; {setup}; exec "$@"', "bash", *COMMAND)


@cache
def _can(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


def faulty_disk(folder: Path, path: str, calls: str, *, trigger: Path | None = None) -> dict[str, str]:
    """Return environment variables by which calls on paths that contain `path` fail (machine_faults.c).

    Args:
        folder: folder for the compiled library.
        path: text in the paths concerned.
        calls: `CALL=ERRNO,...`; 0 for a call that never returns.
        trigger: file whose existence starts the faults; None for faults from the start.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "machine_faults.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    variables = {"LD_PRELOAD": str(library), "FAULTY_PATH": path, "FAULTY_CALLS": calls}
    return variables | ({"FAULTY_TRIGGER": str(trigger)} if trigger is not None else {})


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of its own that `fsfreeze` can freeze."""
    tools = [shutil.which(name) for name in ("mkfs.ext4", "mount", "umount", "fsfreeze")]
    if os.geteuid() != 0 or not all(tools):
        pytest.skip("only root may mount")
    image, disk = folder / "image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    disk.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], capture_output=True, check=False)
        subprocess.run(["umount", "--lazy", disk], check=True)


def first_process(running: Running) -> int:
    """Return the process of a command that `unshare` has started."""
    children = Path(f"/proc/{running.launcher}/task/{running.launcher}/children")
    running.until(children.read_text, "the first process of the container")
    return int(children.read_text().split()[0])
