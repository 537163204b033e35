"""Entry point of the `samestep` command: argument parser, commands, exit codes, and errors of unknown options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from samestep.cli.commands import COMMANDS, build_root
from samestep.cli.external_launcher import (
    ReportedError,
    exit_if_rank,
    exit_now,
    reported_by_rank_0,
    require_local_rank,
)
from samestep.cli.parser import CommandParser, UsageError
from samestep.config.key_suggestions import Equivalent, find_equivalent
from samestep.distributed.logging import configure_logging, logger
from samestep.distributed.streams import lost_output, wait_for_reader
from samestep.errors import EXIT_INPUT, EXIT_STOPPED, InputError, RunError, SamestepError

_OPTION = re.compile(r"--[\w-]+")
_NAME = re.compile(r"--?[A-Za-z]")
_TYPO = 0.75
# Modules of the extra `recipes`; those of other extras are named by their users.
_RECIPE_MODULES = frozenset(("PIL", "jinja2", "sklearn", "tensorboard", "torchmetrics", "torchvision", "yaml"))
# Commands whose results are files; the result of the others is their standard output.
_WRITES_RUN = ("train", "resume", "run")


def build_parser(arguments: Sequence[str] | None = None) -> CommandParser:
    """Return the parser of the command; with `arguments`, only subcommands that these name have their options.

    The modules of a command take most of the time of its start.
    """
    parser, commands = build_root(CommandParser)
    for name, command in COMMANDS.items():
        if arguments is None or name in arguments:
            getattr(import_module(f"samestep.cli.{command.module}"), f"add_{name}")(commands)
        else:
            commands.add_parser(name, help=command.summary)
    for subparser in commands.choices.values():
        subparser.set_defaults(command_parser=subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 failed run, 2 invalid input, 3 failed check, 130 stopped on request.
    """
    try:
        with reported_by_rank_0():
            arguments = sys.argv[1:] if arguments is None else arguments
            parsed = parse_arguments(build_parser(arguments), arguments)
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
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _RECIPE_MODULES:
            raise
        print(f"error: {_not_installed_error(parsed.command, error)}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        return EXIT_STOPPED
    exit_if_rank(code)
    return code


def _not_installed_error(command: str, error: ModuleNotFoundError) -> InputError:
    return InputError(
        f"samestep {command} needs {error.name}, which is not installed",
        expected="the packages of recipes, reports and plots",
        fix="pip install 'samestep[recipes]'",
        code="E_NOT_INSTALLED",
    )


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


def parse_arguments(parser: CommandParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments.

    Raises:
        InputError: an option is unknown, or an argument is invalid.
    """
    # argparse would assign arguments after `--` to the recipe, or report them as unknown.
    before, script_arguments = list(arguments), None
    if "--" in before:
        position = before.index("--")
        before, script_arguments = before[:position], before[position + 1 :]
    try:
        parsed, unknown = parser.parse_known_args(before)
        if script_arguments is not None and not hasattr(parsed, "script_arguments"):
            parsed, unknown = parser.parse_known_args(arguments)
        elif script_arguments is not None:
            parsed.script_arguments = script_arguments
        names = [argument for argument in unknown if _NAME.match(argument)]
        if names:
            raise _unknown(names, arguments, parsed.command_parser)
        if rest := parsed.command_parser.assign(parsed, unknown):
            text = " ".join(rest)
            is_override = "=" in text and "--set" in _options(parsed.command_parser)
            fix = f"--set {text}" if is_override else f"leave {text} out"
            parsed.command_parser.fail(f"unexpected argument {text}", fix, code="E_UNKNOWN_OPTION")
    except UsageError as error:
        command, options = error.parser, _options(error.parser)
        names = [argument for argument in arguments if _NAME.match(argument) and not _is_known(argument, options)]
        if names and command is not parser:
            raise _unknown(names, arguments, command) from error
        raise error.error from error
    return parsed


def _options(command: argparse.ArgumentParser) -> list[str]:
    return _OPTION.findall(command.format_usage())


def _is_known(argument: str, options: Sequence[str]) -> bool:
    """Whether an argument is an option or its abbreviation, as argparse accepts them."""
    name = argument.partition("=")[0]
    return name in ("-h", "--help") or any(option.startswith(name) for option in options)


def _unknown(names: Sequence[str], arguments: Sequence[str], command: argparse.ArgumentParser) -> InputError:
    options = [_with_value(name, arguments) for name in names]
    fixes = [_suggestion(name, text, command) for name, text in options]
    texts = [f"{name} {text}".rstrip() for name, text in options]
    if len(options) > 1:
        fixes = [f"{text}: {fix}" for text, fix in zip(texts, fixes, strict=True)]
    return InputError(
        f"{command.prog}: unknown option{'s' if len(options) > 1 else ''} {', '.join(texts)}",
        expected=f"options of {command.prog} --help",
        fix="\n".join(fixes),
        code="E_UNKNOWN_OPTION",
    )


def _with_value(argument: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return an option and its value, which argparse may have taken for another argument, such as the recipe."""
    name, equals, text = argument.partition("=")
    if not equals:
        following = arguments[arguments.index(argument) + 1 :][:1]
        text = following[0] if following and not _NAME.match(following[0]) else ""
    return name, text


def _suggestion(name: str, text: str, command: argparse.ArgumentParser) -> str:
    options, option = _options(command), f"--{name.lstrip('-').replace('_', '-')}"
    if option in options:
        return Equivalent(option, text or None).suggestion()
    meant = find_equivalent(name, parse_value(text), is_exact=True)
    if meant is not None and meant.key == "--processes" and meant.key not in options and "--devices" in options:
        return Equivalent("--devices", meant.value).suggestion()
    close = get_close_matches(option, options, n=1, cutoff=_TYPO)
    if (meant is None or not _has(meant, options)) and close:
        return Equivalent(close[0], text or None).suggestion()
    meant = meant or find_equivalent(name, parse_value(text))
    if meant is not None and _has(meant, options):
        return meant.suggestion()
    return f"leave {name} out; {command.prog} --help lists the options"


def _has(meant: Equivalent, options: Sequence[str]) -> bool:
    """Whether a command with these options accepts the equivalent; another command is a suggestion too."""
    if meant.is_recipe_key:
        return "--set" in options
    is_command = not meant.key or meant.key.startswith("samestep ")
    return is_command or meant.key.partition(" ")[0] in options


def parse_value(text: str) -> Any:
    """Return the value of an unknown option as a recipe reads it; an option without a value is a switch."""
    if find_spec("yaml") is None:  # of the extra `recipes`
        return text or True
    from samestep.recipes.yaml_text import YAMLError, from_yaml

    try:
        value = from_yaml(text) if text else True
    except YAMLError:
        return text
    is_plain = isinstance(value, float) and "e" not in text.lower()  # `5e-4` keeps its spelling
    return value if is_plain or isinstance(value, bool | int | list) else text
