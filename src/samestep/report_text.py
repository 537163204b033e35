"""Texts of errors: printable, and bounded to one screen."""

from __future__ import annotations

import re

# Limits of a report, below one screen of 60 lines and 8 kB: lines of the progress can precede a
# report.
_MAX_LINES = 48
_MAX_BYTES = 6_144
_MAX_CHARACTERS = 1_000
_LINE_END_CHARACTERS = 100  # kept at the end of a long line, which can have the code
_MAX_TEXT = 1_000_000  # characters of a text of a user
_NAME = type.__dict__["__name__"]
_UNUSUAL = re.compile(r"[^\n -~]")


def printable(text: str) -> str:
    r"""Return `text` with control characters but newlines as escape sequences such as `\x1b`.

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
    """Return a report of printable characters of at most 48 lines and 6 kB.

    A line has at most 1,000 characters. The middle is left out, with a remark.
    """
    lines = text.split("\n")
    begin: list[str] = []
    end: list[str] = []
    size = 0
    while len(begin) + len(end) < min(len(lines), _MAX_LINES - 1):
        # From both ends: the problem is in the first lines, the fix in the last ones.
        is_begin = len(begin) <= len(end)
        number = len(begin) if is_begin else -len(end) - 1
        line = _shortened(lines[number])
        size += len(line.encode()) + 1
        if size > _MAX_BYTES - 100:  # the remark needs a line too
            break
        (begin if is_begin else end).append(line)
    if count := len(lines) - len(begin) - len(end):
        begin.append(f"    ... {count:,} lines are left out ...")
    return "\n".join([*begin, *reversed(end)])


def _shortened(line: str) -> str:
    count = len(line)
    # Before the conversion, which is slow for millions of characters.
    if count > 2 * _MAX_CHARACTERS:
        line = line[:_MAX_CHARACTERS] + line[-_LINE_END_CHARACTERS:]
    line = printable(line)
    if len(line) <= _MAX_CHARACTERS and count <= _MAX_CHARACTERS:
        return line
    remark = f" ... {count:,} characters ... "
    end = remark + line[-_LINE_END_CHARACTERS:]
    return line[: _MAX_CHARACTERS - len(end)] + end


def indented(text: str) -> str:
    """Return `text` with an indent before each line; only the first line of a report has none."""
    return "    " + text.replace("\n", "\n    ")


def message_of(error: object) -> str:
    """Return `str(error)`, or a remark if the class of the error fails to compute the text.

    Of a text of more than a million characters the middle is left out first: each further use takes
    time, in which other ranks end for another reason.
    """
    try:
        return cut_text(str(error))
    except BaseException as failure:  # boundary: the code of a user's exception can raise anything
        return f"<no text: {class_name(error)}.__str__ raised {class_name(failure)}>"


def cut_text(text: str) -> str:
    """Return at most a million characters of a text, without its middle."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text):,} characters ...\n{text[-half:]}"


def class_name(value: object) -> str:
    """Return the name of the class of `value` on one line; it can be any text."""
    name: str = _NAME.__get__(type(value))  # not by attribute, which a metaclass can replace
    return printable(name).replace("\n", "\\n") or "<class without a name>"
