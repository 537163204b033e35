"""Minimal terminal emulator: text, carriage return, line feed, cursor up and erase."""

import re

_TOKEN = re.compile(
    r"\x1b\[(?P<arguments>[\d;?]*)(?P<command>[A-Za-z])|(?P<control>[\x00-\x1f])|(?P<text>[^\x00-\x1f]+)"
)


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
