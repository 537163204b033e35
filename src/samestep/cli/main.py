"""Entry point of the `samestep` command: argument parser, commands and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from samestep.cli import doctor, measure, models, runs, train, verify
from samestep.cli.external_launcher import ReportedError, exit_if_rank, exit_now, reported_by_rank_0
from samestep.distributed.logging import configure_logging
from samestep.errors import EXIT_STOPPED, SamestepError

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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Train PyTorch models on one or many devices with the same result.",
        epilog="example: samestep train digits --processes auto",
    )
    parser.add_argument("--version", action="version", version=f"samestep {version('samestep')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 failed run, 2 invalid input, 3 failed check, 130 stopped on request.
    """
    try:
        with reported_by_rank_0():
            parsed = build_parser().parse_args(arguments)
        configure_logging()
        code: int = parsed.run(parsed)
    except ReportedError as error:
        exit_now(error.exit_code)
    except SamestepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    exit_if_rank(code)
    return code
