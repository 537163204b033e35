"""`samestep audit`: mistakes of distributed training in any training command."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import add_number, add_options, print_json
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError, RunError

_STEPS = 50


def add_audit(commands: Any) -> None:
    """Add `samestep audit`."""
    parser = commands.add_parser(
        "audit",
        help="find mistakes of distributed training in any training command",
        description="Run a training command, such as torchrun, accelerate launch or python, observe its processes, and "
        "report mistakes of distributed training with evidence and the line of the script. The script does not use "
        "Samestep and is not changed.",
        usage="samestep audit [-h] [--steps N] [--json] -- COMMAND ...",
        epilog="example: samestep audit -- torchrun --nproc-per-node 2 train.py. "
        "Exit codes: 0 no finding, 1 nothing was observed, 2 invalid input, 3 findings; if the command fails, its own.",
    )
    text = f"observe the tensors of the first N optimizer steps, then of every 50th step (default {_STEPS})"
    add_number(parser, "--steps", metavar="N", default=_STEPS, help=text)
    add_options(parser, "--json")
    parser.set_defaults(run=_audit, script_arguments=[])


def _audit(arguments: argparse.Namespace) -> int:
    """Run, analyse and print; return 3 with findings, or the exit code of a failed command."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.audit.analysis import analyse, as_json, print_report
    from samestep.tools.audit.injection import run_observed

    require_single_process("audit")
    if not arguments.script_arguments:
        fix = "samestep audit -- torchrun --nproc-per-node 2 train.py"
        raise InputError("samestep audit without a command", "a command after --", fix, code="E_MISSING_KEY")
    with tempfile.TemporaryDirectory(prefix="samestep-audit-") as name:
        folder = Path(name)
        code = run_observed(arguments.script_arguments, folder, arguments.steps, quiet=arguments.json)
        analysis = analyse(folder)
    if not analysis.worlds and code == EXIT_DONE:
        raise RunError(
            "nothing was observed",
            expected="a Python command that trains with PyTorch: a DataLoader or an optimizer of torch",
            fix=f"start the command with the Python of Samestep, {sys.executable}",
            code="E_NOTHING_OBSERVED",
        )
    if arguments.json:
        print_json(as_json(analysis, code))
    else:
        print_report(analysis)
    if code != EXIT_DONE:
        print(f"the command failed with exit code {code}", file=sys.stderr)
        return code
    return EXIT_DIFFERS if analysis.findings else EXIT_DONE
