"""The `samestep` command in a shell: in a pipeline, or with redirected and closed streams."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from helpers.system import COMMAND, Running

CODE = "code"  # file with the exit code of the command


def pipeline(
    *arguments: object,
    cwd: Path,
    streams: str = "2>&1 | tee log",
    command: tuple[str, ...] = COMMAND,
    terminal: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Running:
    """Start the command in a shell with a session and a process group of its own, with redirections `streams`.

    The traps keep both shells alive, the inner one of which writes the exit code. The programs inherit no traps.
    """
    words = shlex.join([*command, *map(str, arguments)])
    script = f"trap : INT TERM HUP; {{ trap : INT TERM HUP; {words}; echo $? > {CODE}; }} {streams}"
    return Running(cwd=cwd, command=("bash", "-c", script), terminal=terminal, variables=variables)


def exit_code(cwd: Path) -> int:
    """Return the exit code of the command of a pipeline that has ended."""
    return int((cwd / CODE).read_text(encoding="utf-8"))
