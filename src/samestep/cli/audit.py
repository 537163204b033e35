"""`samestep audit`: mistakes of distributed training in any training command."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import add_number, add_options, print_json
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError, RunError

_STEPS = 50


def add_audit(add_parser: Any) -> None:
    """Add `samestep audit`."""
    parser = add_parser(
        description="Run a training command, such as torchrun, accelerate launch or python, observe its processes, and "
        "report mistakes of distributed training with evidence and the line of the script. The script does not use "
        "Samestep and is not changed.",
        usage="samestep audit [-h] [--steps N] [--against N | --against-command COMMAND] [--json] -- COMMAND ...",
        epilog="example: samestep audit -- torchrun --nproc-per-node 2 train.py. "
        "Exit codes: 0 no finding, 1 nothing was observed, 2 invalid input, 3 findings; if the command fails, its own.",
    )
    text = f"observe the tensors of the first N optimizer steps, then of every 50th step (default {_STEPS})"
    add_number(parser, "--steps", metavar="N", default=_STEPS, help=text)
    group = parser.add_mutually_exclusive_group()
    text = "run the command again on N processes, and report the first difference with its cause"
    add_number(group, "--against", metavar="N", help=f"{text}; torchrun and accelerate launch")
    text = "the same with another command, such as 'python train.py --devices 1'"
    group.add_argument("--against-command", metavar="COMMAND", help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_audit, script_arguments=[])


def _audit(arguments: argparse.Namespace) -> int:
    """Run, analyse and print; return 3 with findings, or the exit code of a failed command."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.audit.analysis import analyse, print_report
    from samestep.tools.audit.comparison import ProgramComparison, compare_commands, print_comparisons
    from samestep.tools.audit.injection import run_observed

    require_single_process("audit")
    command = arguments.script_arguments
    if not command:
        fix = "samestep audit -- torchrun --nproc-per-node 2 train.py"
        raise InputError("samestep audit without a command", "a command after --", fix, code="E_MISSING_KEY")
    reference = _reference(arguments)

    def run(command: Sequence[str], folder: Path, without: Sequence[str] = ()) -> int:
        return run_observed(command, folder, arguments.steps, quiet=arguments.json, without=without)

    with tempfile.TemporaryDirectory(prefix="samestep-audit-") as name:
        folder = Path(name, "command")
        folder.mkdir()
        code = run(command, folder)
        analysis = analyse(folder)
        if not analysis.worlds and code == EXIT_DONE:
            raise _nothing_observed(command[0])
        comparisons: list[ProgramComparison] = []
        if reference and code == EXIT_DONE:
            code, comparisons = compare_commands(reference, command, folder, Path(name), run)
    if arguments.json:
        against = {"against": [asdict(comparison) for comparison in comparisons]} if reference else {}
        print_json({**asdict(analysis), "exit_code": code, **against})
    else:
        print_report(analysis)
        print_comparisons(comparisons)
    if code != EXIT_DONE:
        print(f"the command failed with exit code {code}", file=sys.stderr)
        return code
    differs = any(comparison.difference is not None for comparison in comparisons)
    return EXIT_DIFFERS if analysis.findings or differs else EXIT_DONE


def _reference(arguments: argparse.Namespace) -> list[str]:
    """Return the command on the other number of processes, or an empty list."""
    from samestep.tools.audit.comparison import reference_command

    if arguments.against is not None:
        return reference_command(arguments.script_arguments, int(arguments.against))
    text = arguments.against_command
    if text is None:
        return []
    try:
        command, problem = shlex.split(text), " is empty"
    except ValueError as error:
        command, problem = [], f": {error}"
    if not command:
        fix = "--against-command 'python train.py --devices 1'"
        raise InputError(f"--against-command {text!r}{problem}", "a command of a shell", fix, code="E_VALUE")
    return command


def _nothing_observed(program: str) -> RunError:
    own = Path(sys.executable).parent
    path = shutil.which(program, path=str(own))  # the first folder of the command's PATH
    is_own = path is not None and Path(path).parent.samefile(own)
    fix = "a script that uses a DataLoader or an optimizer of torch, and Python without -S"
    return RunError(
        "nothing was observed",
        expected="a Python command that trains with PyTorch: a DataLoader or an optimizer of torch",
        fix=fix if is_own else f"start the command with the Python of Samestep, {sys.executable}",
        code="E_NOTHING_OBSERVED",
    )
