"""`samestep audit`: run of a command with observed Python processes, and the report of its events.

Launchers replace `PYTHONPATH`, so a `.pth` file in the folder of installed packages calls the
hooks. The file has no effect unless the variable SAMESTEP_AUDIT is set. It stays after the audit,
since audits can run at the same time.

Decisions: docs/decisions/proofs.md
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import TextIO

from samestep.distributed.env import all_variables
from samestep.distributed.logging import plain_console
from samestep.distributed.stop_request import GROUP_SIGNALS, handled_signals
from samestep.errors import InputError
from samestep.number_text import plural
from samestep.report_text import printable
from samestep.tools.audit.data_findings import (
    data_findings,
    file_findings,
    unchecked_evaluations,
)
from samestep.tools.audit.step_findings import Finding, copy_findings, step_findings
from samestep.tools.audit.worlds import World, group_worlds, read_events

_VARIABLE = "SAMESTEP_AUDIT"
# Subjects of findings, and the kinds of events of which one is necessary.
_SUBJECTS = {
    "samples": {"batch"},
    "random draws": {"dropout", "fetch_draws"},
    "parameters and learning rates": {"update"},
    "losses": {"loss"},
    "schedules": {"schedule"},
    "modules in evaluations": {"evaluation"},
    "counts of evaluations": {"count"},
    "written files": {"file"},
}
_PTH = "samestep-audit.pth"
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to the command too
# The package can have been removed since: then the file has no effect, and prints nothing.
_LINE = (
    f"import os; folder = os.environ.get('{_VARIABLE}'); folder and exec("
    r"'try: from samestep.tools.audit.hooks import install\nexcept ImportError: pass\n"
    r"else: install(folder)')"
    "\n"
)


def run_observed(command: Sequence[str], folder: Path, *, quiet: bool) -> int:
    """Run a command to its end, and write the events of its Python processes to an empty folder.

    Return the exit code; 128 + N after signal N. With `quiet`, the command's standard output
    becomes standard error.

    Raises:
        InputError: the command cannot be started, or the folder of installed packages is not
            writable.
    """
    install_hooks(Path(sysconfig.get_path("purelib")))
    variables = all_variables()
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
    """Run a command, and return its code; a signal ends the command, and the report follows.

    The command has the process group of the audit, and so the terminal: it reads input, and Ctrl-C
    and Ctrl-Z reach it. Other signals are forwarded.
    """
    received: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None = None) -> None:
        received.append(number)
        if number not in _OF_TERMINAL:
            for process in processes:
                process.send_signal(number)

    with (
        handled_signals(GROUP_SIGNALS, forward),
        subprocess.Popen(command, env=variables, stdout=stdout) as process,
    ):
        processes.append(process)
        for number in tuple(received):  # before the start
            forward(number)
        return process.wait()


def install_hooks(packages: Path) -> None:
    """Write the `.pth` file, unless it is there."""
    path = packages / _PTH
    if path.is_file() and path.read_text(encoding="utf-8") == _LINE:
        return
    try:
        with NamedTemporaryFile("w", dir=packages, delete=False, encoding="utf-8") as file:
            file.write(_LINE)
        os.chmod(file.name, 0o644)  # a temporary file is not readable for other users
        # At once: other Python processes read the file at their start.
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
    checked: list[str]  # subjects with observations
    not_checked: list[str]


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
        findings = [*copy_findings(world), *file_findings(world)]
        # Without a group, ranks share nothing that the other rules could compare.
        if world.has_group:
            findings += step_findings(world)
            findings += data_findings(world)
        first: dict[tuple[str, str], Finding] = {}
        for finding in findings:  # later epochs repeat a finding
            first.setdefault((finding.name, finding.line), finding)
        # An update has the number of steps before.
        steps = (event.get("step", 0) + (event["kind"] == "update") for event in world.ranks[0])
        count = max(steps, default=0)
        extent = _extent(world)
        analyses.append(
            WorldAnalysis(world.program, world.size, count, list(first.values()), *extent)
        )
    failures = {
        f"{event['observer']}: {event['error']}": None
        for events in processes
        for event in events
        if event["kind"] == "failure"
    }
    return Analysis(analyses, list(failures))


def _extent(world: World) -> tuple[list[str], list[str]]:
    """Return the subjects that were checked, and those that were not with the reason."""
    by_rank = (*world.ranks.values(), *world.children.values())
    kinds = {event["kind"] for events in by_rank for event in events}
    checked = [name for name, needed in _SUBJECTS.items() if kinds & needed]
    absent = [name for name in _SUBJECTS if name not in checked]
    not_checked = []
    if absent:
        not_checked.append(f"{', '.join(absent)} (not observed)")
    return checked, [*not_checked, *unchecked_evaluations(world)]


def print_report(analysis: Analysis) -> None:
    """Print the findings of each world, and the observed facts."""
    console = plain_console(soft_wrap=True)
    # Not rich's padding, which adds spaces at the ends of lines.
    indented = partial(
        textwrap.fill,
        width=console.width,
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    for world in analysis.worlds:
        for finding in world.findings:
            console.print(printable(f"{finding.name}  {finding.line or world.program}"))
            console.print(indented(printable(finding.evidence)))
            console.print(indented(printable(f"fix: {finding.fix}")))
        count = plural(len(world.findings), "finding")
        extent = f"{plural(world.ranks, 'rank')}, {plural(world.steps, 'optimizer step')}"
        print(f"{world.program}: {count}; {extent}")
        console.print(indented(f"checked: {', '.join(world.checked)}"))
        for text in world.not_checked:
            console.print(indented(f"not checked: {text}"))
    for failure in analysis.failures:
        print(f"not observed: {failure}")
