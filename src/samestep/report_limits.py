"""Text of reports: printable characters, and limits of lines and bytes."""

from __future__ import annotations

import re

# Limits of a report, below one screen of 60 lines and 8 kB: lines of the progress can precede a
# report.
_MAX_LINES = 48
_MAX_BYTES = 6_144
_MAX_CHARACTERS = 1_000
_LINE_END_CHARACTERS = 100  # kept at the end of a long line, which can have the code
_NAME = type.__dict__["__name__"]
_UNUSUAL = re.compile(r"[^\n -~]")


def printable(text: str) -> str:
    r"""Return `text` with every control character, except for newlines, as an escape sequence such as `\x1b`.

    A terminal would execute control characters. Lone surrogates, which stand for invalid UTF-8, are
    escaped too.
    """

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if character.isprintable():
            return character
        return character.encode("unicode_escape").decode()

    return _UNUSUAL.sub(escaped, text.expandtabs(4))


def bounded(text: str) -> str:
    """Return a report of printable characters on at most 48 lines, with at most 6 kB and 1,000 characters per line.

    Lines and characters are left out in the middle, with a remark.
    """
    lines = text.split("\n")
    begin: list[str] = []
    end: list[str] = []
    size = 0
    while len(begin) + len(end) < min(len(lines), _MAX_LINES - 1):
        is_begin = len(begin) <= len(end)
        line = _shortened(lines[len(begin)] if is_begin else lines[-len(end) - 1])
        size += len(line.encode()) + 1
        if size > _MAX_BYTES - 100:  # the remark needs a line too
            break
        (begin if is_begin else end).append(line)
    count = len(lines) - len(begin) - len(end)
    remark = [f"    ... {count:,} lines are left out ..."] if count else []
    return "\n".join([*begin, *remark, *reversed(end)])


def _shortened(line: str) -> str:
    count = len(line)
    if (
        count > 2 * _MAX_CHARACTERS
    ):  # before the conversion, which is slow for millions of characters
        line = line[:_MAX_CHARACTERS] + line[-_LINE_END_CHARACTERS:]
    line = printable(line)
    if len(line) <= _MAX_CHARACTERS and count <= _MAX_CHARACTERS:
        return line
    remark = f" ... {count:,} characters ... "
    return (
        line[: _MAX_CHARACTERS - _LINE_END_CHARACTERS - len(remark)]
        + remark
        + line[-_LINE_END_CHARACTERS:]
    )


def indented(text: str, indent: str = "    ") -> str:
    """Return `text` with an indent before each line; only the first line of a report has none."""
    return indent + text.replace("\n", f"\n{indent}")


def message_of(error: object) -> str:
    """Return `str(error)`, or a remark if the class of the error fails to compute the text."""
    try:
        return str(error)
    except BaseException as failure:  # boundary: the code of a user's exception can raise anything
        return f"<no text: {class_name(error)}.__str__ raised {class_name(failure)}>"


def class_name(value: object) -> str:
    """Return the name of the class of `value` on one line; a class can have any text as its name."""
    name: str = _NAME.__get__(type(value))  # not by attribute, which a metaclass can replace
    return printable(name).replace("\n", "\\n") or "<class without a name>"
