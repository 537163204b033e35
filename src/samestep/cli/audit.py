"""`samestep audit`: mistakes of distributed training in any training command."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from samestep.cli.options import JsonOption, option, option_conflict
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError, RunError

_STEPS = 50


def _command(text: str) -> list[str]:
    command = shlex.split(text)
    if not command:
        raise ValueError
    return command


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Run a training command, observe its processes, and report mistakes of distributed training.

    The command is one such as torchrun, accelerate launch or python. A finding has evidence and the
    line of the script, which does not use Samestep and is not changed. Exit codes: 0 no finding, 1
    nothing was observed, 2 invalid input, 3 findings; if the command fails, its own.
    """

    example: ClassVar = "samestep audit -- torchrun --nproc-per-node 2 train.py"
    usage: ClassVar = "samestep audit [-h] [--steps N] [--against N | --against-command COMMAND] [--json] -- COMMAND ..."

    steps: int = option(
        f"observe the tensors of the first N optimizer steps, then of every 50th step (default {_STEPS})",
        "N",
        default=_STEPS,
    )
    against: int | None = option(
        "run the command again on N processes, and report the first difference with its cause; torchrun and accelerate "
        "launch",
        "N",
    )
    against_command: list[str] | None = option(
        "the same with another command, such as 'python train.py --devices 1'",
        "COMMAND",
        type=_command,
    )
    script_arguments: Sequence[str] = ()


def run(options: Options) -> int:
    """Run, analyse and print; return 3 with findings, or the exit code of a failed command."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.audit.audit import analyse, print_report, run_observed
    from samestep.tools.audit.comparison import (
        ProgramComparison,
        compare_commands,
        print_comparisons,
        reference_command,
    )

    command = list(options.script_arguments)
    if not command:
        fix = "samestep audit -- torchrun --nproc-per-node 2 train.py"
        raise InputError(
            "samestep audit without a command", "a command after --", fix, code="E_MISSING_KEY"
        )
    reference = options.against_command or []
    if options.against is not None:
        if reference:
            raise option_conflict("--against with --against-command")
        reference = reference_command(command, options.against)

    def observe(command: Sequence[str], folder: Path, without: Sequence[str] = ()) -> int:
        return run_observed(command, folder, options.steps, quiet=options.json, without=without)

    with tempfile.TemporaryDirectory(prefix="samestep-audit-") as name:
        folder = Path(name, "command")
        folder.mkdir()
        code = observe(command, folder)
        analysis = analyse(folder)
        if not analysis.worlds and code == EXIT_DONE:
            expected = (
                "a Python command that trains with PyTorch: a DataLoader or an optimizer of torch"
            )
            fix = f"start the command with the Python of Samestep, {sys.executable}, without -S"
            raise RunError("nothing was observed", expected, fix, code="E_NOTHING_OBSERVED")
        comparisons: list[ProgramComparison] = []
        if reference and code == EXIT_DONE:
            code, comparisons = compare_commands(reference, command, folder, Path(name), observe)
    if options.json:
        against = (
            {"against": [asdict(comparison) for comparison in comparisons]} if reference else {}
        )
        options.result({**asdict(analysis), "exit_code": code, **against})
    else:
        print_report(analysis)
        print_comparisons(comparisons)
    if code != EXIT_DONE:
        print(f"the command failed with exit code {code}", file=sys.stderr)
        return code
    differs = any(comparison.difference is not None for comparison in comparisons)
    if analysis.findings or differs:
        return EXIT_DIFFERS
    return EXIT_DONE
