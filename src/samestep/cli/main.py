"""Entry of the `samestep` command: parse, call one function, map errors to exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from samestep.cli import (
    bench,
    convert,
    doctor,
    evaluate,
    export,
    predict,
    profile,
    report,
    resume,
    run_script,
    top,
    train,
    tune,
    verify,
)
from samestep.cli.member import LeaveError, end_as_rank, leave
from samestep.errors import EXIT_STOPPED, SamestepError

_COMMANDS = (
    train,
    resume,
    evaluate,
    predict,
    export,
    convert,
    run_script,
    top,
    report,
    verify,
    bench,
    profile,
    tune,
    doctor,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 the run failed, 2 the input was wrong, 3 a check did not hold, 130 ended on request.
    """
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Train PyTorch models on one or many devices with the same result.",
        epilog="example: samestep train digits --processes auto",
    )
    parser.add_argument("--version", action="version", version=f"samestep {version('samestep')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except LeaveError as error:
        leave(error.exit_code)
    except SamestepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    end_as_rank(code)
    return code
