"""Entry point of the `samestep` command: argument parser, commands and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from samestep.cli import doctor, measure, models, runs, train, verify
from samestep.cli.external_launcher import (
    ReportedError,
    exit_if_rank,
    exit_now,
    reported_by_rank_0,
    require_local_rank,
)
from samestep.cli.unknown_options import CommandParser, parse_arguments
from samestep.distributed.logging import configure_logging, logger
from samestep.distributed.streams import lost_output, wait_for_reader
from samestep.errors import EXIT_STOPPED, InputError, RunError, SamestepError

_COMMANDS = (
    train.add_train,
    train.add_resume,
    models.add_eval,
    models.add_predict,
    models.add_export,
    models.add_convert,
    train.add_run,
    runs.add_top,
    runs.add_report,
    verify.add_verify,
    measure.add_bench,
    measure.add_profile,
    measure.add_tune,
    doctor.add_doctor,
)
# Commands whose results are files; the result of the others is their standard output.
_WRITES_RUN = ("train", "resume", "run")


def build_parser() -> CommandParser:
    """Return the parser of the command with all subcommands."""
    parser = CommandParser(
        prog="samestep",
        description="Train PyTorch models on one or many devices with the same result.",
        epilog="example: samestep train digits --processes auto",
    )
    parser.add_argument("--version", action="version", version=f"samestep {version('samestep')}")
    text = "given by torch.distributed.launch; the environment variable LOCAL_RANK has the same value"
    parser.add_argument("--local-rank", "--local_rank", type=int, metavar="N", help=text)
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    for command in commands.choices.values():
        command.set_defaults(command_parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 failed run, 2 invalid input, 3 failed check, 130 stopped on request.
    """
    try:
        with reported_by_rank_0():
            parsed = parse_arguments(build_parser(), sys.argv[1:] if arguments is None else arguments)
            if parsed.local_rank is not None:
                require_local_rank(parsed.local_rank)
        configure_logging()
        _require_current_folder()
        code: int = parsed.run(parsed)
        _check_output(parsed.command)
    except ReportedError as error:
        exit_now(error.exit_code)
    except SamestepError as error:
        wait_for_reader()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    exit_if_rank(code)
    return code


def _require_current_folder() -> None:
    """Require that the current folder exists: relative paths have no meaning in a removed one."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError(
            "the current folder was removed",
            expected="a current folder that exists: paths of runs and data are relative to it",
            fix="cd to an existing folder",
            code="E_NO_FOLDER",
        ) from error


def _check_output(command: str) -> None:
    """Report lost output; the result of a command that writes a run is complete without its output."""
    error = lost_output()
    if error is None:
        return
    problem = f"standard output cannot be written: {error.strerror}"
    if command not in _WRITES_RUN:
        raise RunError(problem, expected="space for the result", fix="free space on the disk", code="E_OUTPUT")
    logger.warning(problem)
