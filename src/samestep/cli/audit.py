"""`samestep audit`: mistakes of distributed training in any training command."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from samestep.cli.external_launcher import require_single_process
from samestep.cli.options import JsonOption, option, option_conflict, print_json
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError, RunError

_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Run a training command, observe its processes, and report mistakes of distributed training.

    The command is one such as torchrun, accelerate launch or python. A finding has evidence and the line of the script,
    which does not use Samestep and is not changed. Exit codes: 0 no finding, 1 nothing was observed, 2 invalid input, 3
    findings; if the command fails, its own.
    """

    example: ClassVar = "samestep audit -- torchrun --nproc-per-node 2 train.py"
    usage: ClassVar = (
        "samestep audit [-h] [--steps N] [--against N | --against-command COMMAND] [--json] -- COMMAND ..."
    )

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
    against_command: str | None = option(
        "the same with another command, such as 'python train.py --devices 1'", "COMMAND"
    )
    script_arguments: Sequence[str] = ()


def run(options: Options) -> int:
    """Run, analyse and print; return 3 with findings, or the exit code of a failed command."""
    # Imported here: the other commands do not need these modules.
    from samestep.tools.audit.analysis import analyse, print_report
    from samestep.tools.audit.comparison import ProgramComparison, compare_commands, print_comparisons
    from samestep.tools.audit.injection import run_observed

    require_single_process("audit")
    command = list(options.script_arguments)
    if not command:
        fix = "samestep audit -- torchrun --nproc-per-node 2 train.py"
        raise InputError("samestep audit without a command", "a command after --", fix, code="E_MISSING_KEY")
    reference = _reference(options)

    def observe(command: Sequence[str], folder: Path, without: Sequence[str] = ()) -> int:
        return run_observed(command, folder, options.steps, quiet=options.json, without=without)

    with tempfile.TemporaryDirectory(prefix="samestep-audit-") as name:
        folder = Path(name, "command")
        folder.mkdir()
        code = observe(command, folder)
        analysis = analyse(folder)
        if not analysis.worlds and code == EXIT_DONE:
            raise RunError(
                "nothing was observed",
                expected="a Python command that trains with PyTorch: a DataLoader or an optimizer of torch",
                fix=f"start the command with the Python of Samestep, {sys.executable}, without -S",
                code="E_NOTHING_OBSERVED",
            )
        comparisons: list[ProgramComparison] = []
        if reference and code == EXIT_DONE:
            code, comparisons = compare_commands(reference, command, folder, Path(name), observe)
    if options.json:
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


def _reference(options: Options) -> list[str]:
    """Return the command on the other number of processes, or an empty list."""
    from samestep.tools.audit.comparison import reference_command

    text = options.against_command
    if text is not None and options.against is not None:
        raise option_conflict("--against with --against-command", "one of the two options")
    if options.against is not None:
        return reference_command(list(options.script_arguments), options.against)
    if text is None:
        return []
    try:
        command = shlex.split(text)
    except ValueError:
        command = []
    if not command:
        fix = "--against-command 'python train.py --devices 1'"
        raise InputError(f"--against-command {text!r}", "a command of a shell", fix, code="E_VALUE")
    return command
