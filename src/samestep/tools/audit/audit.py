"""`samestep audit`: run of a command with observed Python processes, and the report of its events.

Launchers replace `PYTHONPATH`, so a `.pth` file in the folder of installed packages calls the
hooks. The file has no effect unless the variable SAMESTEP_AUDIT is set. It stays after the audit,
since audits can run at the same time.

Decisions: docs/decisions/proofs.md
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import TextIO

from rich.padding import Padding

from samestep.distributed.env import environment_copy
from samestep.distributed.logging import plain_console
from samestep.distributed.signals import GROUP_SIGNALS
from samestep.errors import InputError, printable
from samestep.tools.audit.data_findings import checkpoint_findings, data_findings, file_findings
from samestep.tools.audit.step_findings import Finding, step_findings
from samestep.tools.audit.worlds import group_worlds, read_events
from samestep.units import plural

_VARIABLE = "SAMESTEP_AUDIT"
_PTH = "samestep-audit.pth"
_LINE = (
    f"import os; folder = os.environ.get('{_VARIABLE}'); "
    "folder and __import__('samestep.tools.audit.hooks', fromlist=['install']).install(folder)\n"
)


def run_observed(
    command: Sequence[str], folder: Path, steps: int, *, quiet: bool, without: Sequence[str] = ()
) -> int:
    """Run a command to its end, and write the events of its Python processes to an empty folder.

    Return the exit code; 128 + N after signal N. With `quiet`, the command's standard output
    becomes standard error. For `steps` and `without` see `Session`.

    Raises:
        InputError: the command cannot be started, or the folder of installed packages is not
            writable.
    """
    install_hooks(Path(sysconfig.get_path("purelib")))
    settings = {"steps": steps, "without": list(without)}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    variables = environment_copy()
    # As in an activated environment: `python` and `torchrun` are those with the hooks in their
    # packages.
    programs = variables.get("PATH", os.defpath)
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{programs}"
    variables[_VARIABLE] = str(folder)
    stdout = sys.stderr if quiet else None
    try:
        code = _run(command, variables, stdout)
    except OSError as error:
        raise InputError(
            f"{command[0]} cannot be started: {error.strerror}",
            expected="a program after --",
            fix="samestep audit -- python train.py",
            code="E_FILE_MISSING",
        ) from error
    if code >= 0:
        return code
    return 128 - code


def _run(command: Sequence[str], variables: dict[str, str], stdout: TextIO | None) -> int:
    """Run a command in its own process group, to which signals are forwarded, and return its code.

    The report follows the end of the command. The terminal belongs to the group of this process, so
    the command receives no input from a terminal.
    """
    stdin = subprocess.DEVNULL if sys.stdin is not None and sys.stdin.isatty() else None
    received: list[int] = []
    groups: list[int] = []

    def forward(number: int, _: FrameType | None = None) -> None:
        received.append(number)
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)

    before = {number: signal.signal(number, forward) for number in GROUP_SIGNALS}
    try:
        with subprocess.Popen(
            command, env=variables, stdin=stdin, stdout=stdout, process_group=0
        ) as process:
            groups.append(process.pid)
            for number in tuple(received):  # before the start
                forward(number)
            return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_hooks(packages: Path) -> None:
    """Write the `.pth` file, unless it is there."""
    path = packages / _PTH
    if path.is_file() and path.read_text(encoding="utf-8") == _LINE:
        return
    try:
        with NamedTemporaryFile("w", dir=packages, delete=False, encoding="utf-8") as file:
            file.write(_LINE)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}",
            expected="a writable folder of installed packages: the audited processes load the "
            "hooks from it",
            fix="use a virtual environment, or run `samestep audit` once with the rights to write "
            "there",
            code="E_OUTPUT",
        ) from error


@dataclass(frozen=True)
class WorldAnalysis:
    """Findings of one world, and the extent of its observation."""

    program: str
    ranks: int
    steps: int  # optimizer steps
    findings: list[Finding]


@dataclass(frozen=True)
class Analysis:
    """Result of an audit."""

    worlds: list[WorldAnalysis]
    failures: list[str]  # observers that failed, with the error

    @property
    def findings(self) -> list[Finding]:
        """The findings of all worlds."""
        return [finding for world in self.worlds for finding in world.findings]


def analyse(folder: Path) -> Analysis:
    """Return the findings in the events of a folder, for worlds that trained or loaded data."""
    processes = list(read_events(folder))
    worlds = [
        world
        for world in group_worlds(processes)
        if world.events("update")[0] or world.events("pass")[0]
    ]
    analyses = []
    for world in worlds:
        findings = (
            *step_findings(world),
            *file_findings(world),
            *data_findings(world),
            *checkpoint_findings(world, [other for other in worlds if other is not world]),
        )
        first: dict[tuple[str, str], Finding] = {}
        for finding in findings:  # later epochs repeat a finding
            first.setdefault((finding.name, finding.line), finding)
        steps = (event.get("step", 0) + (event["kind"] == "update") for event in world.ranks[0])
        count = max(steps, default=0)
        analyses.append(WorldAnalysis(world.program, world.size, count, list(first.values())))
    failures = {
        f"{event['observer']}: {event['error']}": None
        for events in processes
        for event in events
        if event["kind"] == "failure"
    }
    return Analysis(analyses, list(failures))


def print_report(analysis: Analysis) -> None:
    """Print the findings of each world, and the observed facts."""
    console = plain_console(soft_wrap=False)
    for world in analysis.worlds:
        for finding in world.findings:
            line = printable(f"{finding.name}  {finding.line or world.program}")
            console.print(line, soft_wrap=True)
            console.print(Padding(printable(finding.evidence), (0, 0, 0, 4)))
        count = plural(len(world.findings), "finding")
        extent = f"{plural(world.ranks, 'rank')}, {plural(world.steps, 'optimizer step')}"
        print(f"{world.program}: {count}; {extent}")
    for failure in analysis.failures:
        print(f"not observed: {failure}")
