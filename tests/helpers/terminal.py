"""Terminals of programs, with a minimal emulator: text, carriage return, line feed, cursor up and erase."""

import codecs
import os
import pty
import re
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.system import until

_TOKEN = re.compile(
    r"\x1b\[(?P<arguments>[\d;?]*)(?P<command>[A-Za-z])|(?P<control>[\x00-\x1f])|(?P<text>[^\x00-\x1f]+)"
)
_CUT = re.compile(r"(\x1b(\[[\d;?]*)?)?$")  # incomplete escape sequence at the end


class Screen:
    """Lines of text and a cursor; `frames` has the lines after each piece of output."""

    def __init__(self) -> None:
        self.lines = [""]
        self.frames: list[list[str]] = []
        self._row = self._column = 0

    def feed(self, output: str) -> None:
        """Process output. Raises ValueError for an unknown escape sequence."""
        for token in _TOKEN.finditer(output):
            if token["text"] is not None:
                self._write(token["text"])
            elif token["control"] is not None:
                self._control(token["control"])
            else:
                self._command(token["command"], token["arguments"])
            self.frames.append([line.rstrip() for line in self.lines if line.strip()])

    def _write(self, text: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _control(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        else:
            raise ValueError(f"control character {character!r}")

    def _command(self, command: str, arguments: str) -> None:
        if command == "A":
            self._row -= int(arguments or 1)
            assert self._row >= 0, "above the first line"
        elif command == "K":
            line = self.lines[self._row]
            self.lines[self._row] = "" if arguments == "2" else line[: self._column]
        elif command not in ("m", "h", "l"):  # color; visibility of the cursor
            raise ValueError(f"escape sequence {arguments}{command}")


class Terminal:
    """Terminal, and the text on it."""

    def __init__(self, slave: int) -> None:
        self.slave = slave
        self.screen = Screen()
        self._lock = threading.Lock()

    def read(self, master: int) -> None:
        """Read until every process has closed the other end."""
        decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
        while True:
            try:
                rest += decoder.decode(os.read(master, 4096))
            except OSError:  # Linux: the other end is closed
                return
            complete = len(rest) - len(_CUT.search(rest)[0])  # type: ignore[index]
            with self._lock:
                self.screen.feed(rest[:complete])
            rest = rest[complete:]

    def frames(self, last: int = 0) -> list[str]:
        """Return the text on the screen after each change."""
        with self._lock:
            return ["\n".join(frame) for frame in self.screen.frames[-last:]]

    def wait_for(self, pattern: str, what: str, *, seconds: float = 60) -> None:
        """Wait until the screen shows a pattern; otherwise fail with its text."""
        until(lambda: self.shows(pattern), what, seconds, lambda: "\n".join(self.frames(1)))

    def shows(self, pattern: str) -> bool:
        """Return whether the pattern is, or was recently, on the screen."""
        return any(re.search(pattern, frame, re.MULTILINE) for frame in self.frames(200))


@contextmanager
def open_terminal(columns: int) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    terminal = Terminal(slave)
    reader = threading.Thread(target=terminal.read, args=(master,))
    reader.start()
    try:
        yield terminal
    finally:
        os.close(slave)
        reader.join()
        os.close(master)
