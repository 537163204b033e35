"""Argument parser whose errors have a value, an expectation and a fix."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from samestep.errors import InputError

_EXAMPLE = re.compile(r"examples?: (.+?)(?:; |\. |$)")
_KINDS = {"int": "an integer", "float": "a number"}


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
