"""Entry point of the `samestep` command: argument parser, commands, exit codes, and errors of arguments."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from samestep.cli.commands import COMMANDS, PRELOAD, build_root
from samestep.cli.external_launcher import (
    ReportedError,
    exit_if_rank,
    exit_now,
    reported_by_rank_0,
    require_local_rank,
)
from samestep.distributed.env import read_rendezvous
from samestep.distributed.logging import configure_logging, logger
from samestep.distributed.signals import handled_signals
from samestep.distributed.streams import lost_output, wait_for_reader
from samestep.errors import EXIT_INPUT, EXIT_STOPPED, InputError, RunError, SamestepError
from samestep.launcher.launch import start_early

if TYPE_CHECKING:
    from samestep.config.key_suggestions import Equivalent

_OPTION = re.compile(r"--[\w-]+")
_NAME = re.compile(r"--?[A-Za-z]")
_TYPO = 0.75
# Modules of the extra `recipes`; those of other extras are named by their users.
_RECIPE_MODULES = frozenset(("PIL", "jinja2", "tensorboard", "torchvision", "yaml"))
# Commands whose results are files; the result of the others is their standard output.
_WRITES_RUN = ("train", "resume", "run")
_EXAMPLE = re.compile(r"examples?: (.+?)(?:; |\. |$)")
_KINDS = {"int": "an integer", "float": "a number"}


def build_parser(arguments: Sequence[str] | None = None) -> CommandParser:
    """Return the parser of the command; with `arguments`, only subcommands that these name have their options.

    The modules of a command take most of the time of its start.
    """
    parser, commands = build_root(CommandParser)
    for name, command in COMMANDS.items():
        if arguments is None or name in arguments:
            add = getattr(import_module(f"samestep.cli.{name}"), f"add_{name}")
            add(partial(commands.add_parser, name, help=command.summary))
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
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _early_start(arguments):
            with reported_by_rank_0():
                parsed = parse_arguments(build_parser(arguments), arguments)
                if parsed.local_rank is not None:
                    require_local_rank(parsed.local_rank)
            configure_logging()
            code: int = parsed.run(parsed)
        _check_output(parsed.command)
    except ReportedError as error:
        exit_now(error.exit_code)
    except SamestepError as error:
        wait_for_reader()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (ModuleNotFoundError, OSError) as error:
        if (input_error := _input_error(error)) is None:
            raise
        print(f"error: {input_error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        # CPython ends by SIGINT after an interrupt within `exec`, such as that of a dataclass, until the next `exec`.
        exec("")
        return EXIT_STOPPED
    exit_if_rank(code)
    return code


@contextmanager
def _early_start(arguments: Sequence[str]) -> Iterator[None]:
    """Start the fork server before the imports of a command that starts ranks.

    Inside the block SIGTERM interrupts such a command, as Ctrl-C does, so that it leaves nothing behind.
    """
    with reported_by_rank_0():
        _require_current_folder()
        command = COMMANDS.get(arguments[0]) if arguments else None
        is_help = bool({"-h", "--help"}.intersection(arguments))
        starts = command is not None and command.starts_ranks and not is_help and read_rendezvous() is None
    if not starts:
        yield
        return
    with handled_signals((signal.SIGTERM,), signal.default_int_handler):
        start_early(PRELOAD)
        yield


def _input_error(error: ModuleNotFoundError | OSError) -> InputError | None:
    """Return the error of a missing extra, or of a path that no file can have; None for other errors."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _RECIPE_MODULES:
        return InputError(
            f"{error.name} is not installed",
            expected="the packages of recipes, reports and plots",
            fix="pip install 'samestep[recipes]'",
            code="E_NOT_INSTALLED",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        expected = "a path whose names this file system accepts: mostly 255 bytes each"
        return InputError(f"{error.filename}: {error.strerror}", expected, "a shorter path", code="E_UNREADABLE")
    return None


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
        if script_arguments is not None and _lacks_script(parser, before):
            before, script_arguments = [*before, *script_arguments], None
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


def _lacks_script(parser: CommandParser, arguments: Sequence[str]) -> bool:
    """Whether a command that passes all arguments after its script on has no script among these arguments."""
    try:
        parser.parse_known_args(arguments)
    except UsageError as error:
        passes_on = any(action.nargs == argparse.REMAINDER for action in error.parser._actions)
        return passes_on and error.error.code == "E_MISSING_KEY"
    return False


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
    from samestep.config.key_suggestions import Equivalent, find_equivalent

    options, option = _options(command), f"--{name.lstrip('-').replace('_', '-')}"
    if option in options:
        return Equivalent(option, text or None).suggestion()
    meant = find_equivalent(name, parse_value(text), is_exact=True)
    is_count = meant is not None and meant.key in ("--devices", "--processes") and "--processes" not in options
    if meant is not None and is_count and "--devices" in options:
        is_one = any("--devices" in action.option_strings and action.metavar == "N" for action in command._actions)
        return Equivalent("--devices", 4 if is_one and not isinstance(meant.value, int) else meant.value).suggestion()
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


class UsageError(Exception):
    """Invalid arguments; unknown options, which can be their cause, are reported in place of them.

    Attributes:
        parser: parser of the command.
        error: error for the user.
    """

    def __init__(self, parser: CommandParser, error: InputError) -> None:
        super().__init__(str(error))
        self.parser, self.error = parser, error


class CommandParser(argparse.ArgumentParser):
    """Parser that raises `UsageError` for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a missing argument, or that of an option which argparse refuses."""
        cause = sys.exception()
        if "are required:" in message or "is required" in message:
            example = _EXAMPLE.search(self.epilog or "")
            self.fail(message, f"such as: {example[1]}" if example else "", code="E_MISSING_KEY")
        if not isinstance(cause, argparse.ArgumentError):  # an ambiguous abbreviation
            self.fail(message, "the whole name of the option", code="E_UNKNOWN_OPTION")
        action = next((a for a in self._actions if "/".join(a.option_strings) == cause.argument_name), None)
        problem = f"{cause.argument_name}: {cause.message}" if cause.argument_name else cause.message
        if action is not None and action.option_strings and cause.message.startswith("expected"):
            name, value = _name(action), _example(action)
            fix = f"{name} {value}, or {name}=VALUE for a value that begins with a hyphen"
            self.fail(problem, fix, expected=f"{name} {action.metavar or value}", code="E_VALUE")
        code = "E_OPTION_CONFLICT" if "not allowed with" in cause.message else "E_VALUE"
        self.fail(problem, code=code)

    def fail(self, problem: str, fix: str = "", *, expected: str = "", code: str) -> NoReturn:
        """Raise the error of invalid arguments; the fix includes the help of the command."""
        expected = expected or f"the arguments of {self.prog} --help"
        fix = f"{fix}; {self.prog} --help lists all" if fix else f"{self.prog} --help"
        raise UsageError(self, InputError(f"{self.prog}: {problem}", expected, fix, code=code))

    def assign(self, parsed: argparse.Namespace, texts: Sequence[str]) -> list[str]:
        """Assign arguments after options to the last argument, if it accepts them; return the others.

        argparse fills all arguments that can be empty before the first option.
        """
        rest = list(texts)
        last = next((action for action in reversed(self._actions) if not action.option_strings), None)
        if last is None or any(text.startswith("-") for text in rest):
            return rest
        value = getattr(parsed, last.dest)
        if last.nargs in ("*", "+"):
            setattr(parsed, last.dest, [*(value or ()), *(self._get_value(last, text) for text in rest)])
            return []
        if last.nargs == "?" and value is None and rest:
            setattr(parsed, last.dest, self._get_value(last, rest.pop(0)))
        return rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            expected = _KINDS.get(getattr(action.type, "__name__", ""), "a valid value")
            name = _name(action)
            self.fail(f"{name} {arg_string}", f"{name} {_example(action)}", expected=expected, code="E_VALUE")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        close = get_close_matches(str(value), choices, n=1)
        is_command = isinstance(action, argparse._SubParsersAction)
        name, prefix = ("unknown command", [self.prog]) if is_command else (_name(action), action.option_strings[-1:])
        fix = f"did you mean {' '.join([*prefix, *close])}?" if close else ""
        code = "E_UNKNOWN_NAME" if is_command else "E_VALUE"
        self.fail(f"{name} {value}", fix, expected=f"one of {', '.join(choices)}", code=code)


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _example(action: argparse.Action) -> Any:
    """Return a value of an option for a fix: the default, a number, or the name of the value."""
    kind = getattr(action.type, "__name__", "")
    return 1 if kind in _KINDS and action.default is None else action.default or action.metavar or "VALUE"
