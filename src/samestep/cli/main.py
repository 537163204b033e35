"""Entry point of the `samestep` command: arguments, exit codes, and errors of arguments."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from samestep.cli.commands import (
    CAN_BE_RANK,
    COMMANDS,
    PRELOAD,
    SHELLS,
    STARTS_RANKS,
    help_text,
    recipe_summaries,
)
from samestep.cli.launch_options import ReportedError, exit_if_rank, reported_by_rank_0
from samestep.cli.options import add_fields, options_of, parse_settings
from samestep.config.key_suggestions import SYNONYMS, suggest
from samestep.distributed.env import read_rank_place
from samestep.distributed.logging import configure_logging, logger
from samestep.distributed.standard_streams import lost_output, wait_for_reader
from samestep.distributed.stop_request import handled_signals
from samestep.errors import EXIT_DONE, EXIT_INPUT, EXIT_STOPPED, InputError, RunError, SamestepError
from samestep.launcher.fork_server import start_early
from samestep.launcher.worker import exit_process

# Modules of the extra `recipes`; those of other extras are named by their users.
_RECIPE_MODULES = frozenset(("PIL", "jinja2", "tensorboard", "torchvision", "yaml"))
_RECIPE_NAMES = {
    "bash": "_samestep_recipes",
    "fish": "(_samestep_recipes)",
    "tcsh": "f",
    "zsh": "_samestep_recipes",
}
# Options of commands that start ranks without which none starts.
_NO_RANKS = frozenset(("-h", "--help", "--help-all", "--print", "--schema"))
# Commands with files as results; the result of the others is their standard output.
_WRITES_RUN = ("train", "resume", "run")


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, which raises an `InputError` for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a message of argparse."""
        # argparse has no codes: its messages are recognized by words.
        code = "E_VALUE"
        if "required" in message:
            code = "E_MISSING_KEY"
        elif "could match" in message:
            code = "E_UNKNOWN_OPTION"
        fix = f"{self.prog} --help"
        expected = f"arguments as in {fix}"
        if code == "E_MISSING_KEY":
            fix = str(self.epilog).removeprefix("example: ")
        raise InputError(f"{self.prog}: {message}", expected, fix, code=code)

    def unknown(self, argument: str, arguments: Sequence[str]) -> InputError:
        """Return the error of one of `arguments`, an option that the command does not have."""
        usage = self.format_usage()
        options = re.findall(r"--[\w-]+", usage)
        settings: list[str] = []
        if "KEY=VALUE" in usage:
            settings = [name for name in SYNONYMS.values() if not name.startswith("-")]
        name, equals, value = argument.partition("=")
        if not equals:
            after = list(arguments)[arguments.index(argument) + 1 :]
            value = next((text for text in after[:1] if not text.startswith("-")), "VALUE")
        problem = f"{self.prog}: unknown {argument}"
        expected = f"arguments as in {self.prog} --help"
        meant = suggest(name, [*options, *settings])
        if name == "--set" and settings:
            expected = "settings as arguments: key=value"
            others = [text.removeprefix("--set=") for text in arguments if text != "--set"]
            fix = shlex.join([*self.prog.split(), *others])
        elif meant is None:
            fix = f"{self.prog} --help lists the options"
        elif meant in settings:
            fix = f"did you mean {shlex.quote(f'{meant}={value}')}?"
        else:
            fix = f"did you mean {meant}?"
        return InputError(problem, expected, fix, code="E_UNKNOWN_OPTION")


def _options_class(name: str) -> Any:
    module = import_module(f"samestep.cli.{COMMANDS[name].module}")
    return getattr(module, name.capitalize())


def build_parser(name: str) -> CommandParser:
    """Return the parser of a command."""
    kind = _options_class(name)
    parser = CommandParser(prog=f"samestep {name}")
    parser.description = " ".join(kind.__doc__.split())
    parser.epilog = f"example: {kind.example}"
    parser.usage = getattr(kind, "usage", None)
    add_fields(parser, kind)
    return parser


def _print_help(name: str, arguments: Sequence[str]) -> None:
    """Print the help of a command: its usual options, or with `--help-all` all of them.

    After a recipe, the command that prints its settings follows.
    """
    parser = build_parser(name)
    usual = getattr(_options_class(name), "usual", None)
    epilog = [parser.epilog or ""]
    if usual is not None and "--help-all" not in arguments:
        for action in parser._actions:
            if action.option_strings and action.dest not in (*usual, "help"):
                action.help = argparse.SUPPRESS
        epilog.append(f"further options: samestep {name} --help-all")
    recipe = next((text for text in arguments if text in recipe_summaries()), None)
    if recipe is not None:
        epilog.append(f"settings of {recipe}: samestep train {recipe} --print")
    # argparse would join the lines of the epilog.
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join(textwrap.wrap(parser.description or "", 78))
    parser.epilog = "\n".join(epilog)
    parser.print_help()


def _text_of(arguments: Sequence[str]) -> str | None:
    """Return the text that `samestep` prints with an option in place of a command, or None."""
    first = next(iter(arguments), "--help")
    if first in ("-h", "--help"):
        return help_text()
    if first == "--version":
        from importlib.metadata import version  # here: the import takes 20 ms

        return f"samestep {version('samestep')}"
    if first == "--print-completion":
        return _completion("".join(arguments[1:2]))
    return None


def _completion(shell: str) -> str:
    """Return the completion of a shell, by shtab.

    Raises:
        InputError: shtab is not installed, or does not know the shell.
    """
    if shell not in SHELLS:
        value = f"--print-completion {shell}"
        raise InputError(value, f"one of {', '.join(SHELLS)}", f"--print-completion {SHELLS[0]}")
    try:
        import shtab
    except ModuleNotFoundError as error:
        value = "shtab is not installed"
        expected = "the package that writes completions"
        raise InputError(value, expected, "pip install shtab", code="E_NOT_INSTALLED") from error
    parser = argparse.ArgumentParser(prog="samestep")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        options = commands.add_parser(name, help=command.summary)
        add_fields(options, _options_class(name))
        for action in options._actions:
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.dest == "recipe":
                action.complete = _RECIPE_NAMES  # type: ignore[attr-defined]
    names = " ".join(recipe_summaries())
    fish = f"printf '%s\\n' {names}; __fish_complete_path (commandline -ct)"
    preamble = {
        "bash": f"_samestep_recipes() {{ compgen -W '{names}' -- $1; compgen -f -- $1; }}",
        "fish": f"function _samestep_recipes; {fish}; end",
        "tcsh": "",
        "zsh": f"_samestep_recipes() {{ compadd {names}; _files }}",
    }
    return str(shtab.complete(parser, shell, preamble=preamble[shell]))


def parse_arguments(arguments: Sequence[str]) -> Callable[[], int]:
    """Return a call of the command with its options.

    Raises:
        InputError: the command or an option is unknown, or an argument is invalid.
    """
    if arguments[0] not in COMMANDS:
        raise _unknown_command(arguments)
    name, *rest = arguments
    own = rest[: rest.index("--")] if "--" in rest else rest
    # The options of `run` end at the script, which can have a --help of its own.
    if name != "run" and {"-h", "--help", "--help-all"}.intersection(own):
        _print_help(name, own)
        return lambda: EXIT_DONE
    parser = build_parser(name)
    kind = _options_class(name)
    script_arguments: list[str] = []
    if "--" in rest and hasattr(kind, "script_arguments"):
        position = rest.index("--")
        script_arguments = rest[position + 1 :]
        rest = rest[:position]
    # Arguments that can be left out may follow options, except before those of the script of `run`.
    # Known arguments: the error of an unknown one has a suggestion.
    parse = parser.parse_known_args if name == "run" else parser.parse_known_intermixed_args
    parsed, unknown = parse(rest)
    if unknown:
        raise parser.unknown(unknown[0], rest)
    if hasattr(parsed, "overrides"):
        parsed.overrides = parse_settings(parsed.overrides, kind.path_keys)
    # `doctor` and others also run with variables of a launcher that are incomplete.
    rank_place = None if name in CAN_BE_RANK else read_rank_place()
    if rank_place is not None and rank_place.world_size > 1:
        launcher = rank_place.launcher
        place = f"rank {rank_place.rank} of {rank_place.world_size} processes"
        raise InputError(
            f"samestep {name} is {place} that {launcher} started",
            expected=f"one process: samestep {name} starts ranks itself",
            fix=f"start the command without {launcher}",
            code="E_LAUNCH",
        )
    parsed.script_arguments = script_arguments
    run: Callable[[], int] = options_of(kind, parsed).run
    return run


def _unknown_command(arguments: Sequence[str]) -> InputError:
    expected = f"one of {', '.join(COMMANDS)}"
    problem = f"unknown command {arguments[0]}"
    meant = suggest(arguments[0], COMMANDS)
    fix = "samestep --help lists all"
    if meant is not None:
        fix = f"did you mean {shlex.join(['samestep', meant, *arguments[1:]])}?"
    path = Path(arguments[0])
    if path.suffix == ".py" and path.is_file():
        fix = shlex.join(["samestep", "run", *arguments])
    elif path.exists():
        from samestep.recipes.recipe_files import train_command  # here: it imports pydantic

        fix = train_command(path)
    elif arguments[0] in recipe_summaries():
        fix = shlex.join(["samestep", "train", *arguments])
    return InputError(problem, expected, fix, code="E_UNKNOWN_NAME")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 failed run, 2 invalid input, 3 failed check, 130 stopped on request.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments and arguments[0].startswith(("--local-rank=", "--local_rank=")):
        # Added by torch.distributed.launch; LOCAL_RANK has the same value.
        arguments = arguments[1:]
    try:
        text = _text_of(arguments)
        if text is not None:
            print(text)
            return EXIT_DONE
        # The fork server imports torch while this process parses arguments and reads the recipe.
        with _early_start(arguments):
            with reported_by_rank_0():
                run = parse_arguments(arguments)
            configure_logging()
            code = run()
        _check_output(arguments[0])
    except ReportedError as error:
        exit_process(error.exit_code)  # another rank has reported the failure
    except SamestepError as error:
        wait_for_reader()  # results that were printed before come first
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (ModuleNotFoundError, OSError) as error:
        if (input_error := _input_error(error)) is None:
            raise
        print(f"error: {input_error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        # CPython ends by SIGINT after an interrupt within `exec`, such as that of a dataclass,
        # until the next `exec`.
        exec("")
        return EXIT_STOPPED
    exit_if_rank(code)
    return code


@contextmanager
def _early_start(arguments: Sequence[str]) -> Iterator[None]:
    """Start the fork server before the imports of a command that starts ranks.

    Inside the block SIGTERM interrupts such a command, as Ctrl-C does, so that it leaves nothing
    behind.
    """
    os.getcwd()  # raises an error in a removed folder, in which no process can be started
    starts = bool(arguments) and arguments[0] in STARTS_RANKS
    if _NO_RANKS.intersection(arguments):
        starts = False
    with reported_by_rank_0():
        starts = starts and read_rank_place() is None  # a rank of another launcher starts none
    if not starts:
        yield
        return
    with handled_signals((signal.SIGTERM,), _interrupt):
        start_early(PRELOAD)
        yield


def _interrupt(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # another one would interrupt the way out
    raise KeyboardInterrupt


def _input_error(error: ModuleNotFoundError | OSError) -> InputError | None:
    """Return the error of a missing extra, or of a path that no file can have, or None."""
    if isinstance(error, ModuleNotFoundError):
        # A missing module of the user's own is an error of the script, with a traceback.
        if (error.name or "").partition(".")[0] not in _RECIPE_MODULES:
            return None
        fix = "pip install 'samestep[recipes]'"
        expected = "the packages of recipes, reports and plots"
        return InputError(f"{error.name} is not installed", expected, fix, code="E_NOT_INSTALLED")
    is_no_folder = error.errno == errno.ENOENT and error.filename is None
    if error.errno == errno.ENAMETOOLONG or is_no_folder:
        problem = f"{error.filename or 'the current folder'}: {error.strerror}"
        expected = "a path that can exist"
        return InputError(problem, expected, "another path or folder", code="E_UNREADABLE")
    return None


def _check_output(command: str) -> None:
    """Report lost output; the result of a command that writes a run is complete without it."""
    error = lost_output()
    if error is None:
        return
    problem = f"standard output cannot be written: {error.strerror}"
    if command not in _WRITES_RUN:
        expected = "space for the result"
        raise RunError(problem, expected, "free space on the disk", code="E_OUTPUT")
    logger.warning(problem)
