"""What each rank of a run has told of itself last."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from samestep.record.events import read_line
from samestep.tools.top.follow import Follower
from samestep.tools.top.picture import RankRow, Sign

SILENT_SECONDS = 10.0
_NAME = re.compile(r"rank-(\d+)\.jsonl")
# Some hundred lines, of which the last is all that is needed.
_LAST_BYTES = 1 << 16
# The time since 1970 at which a process began is known as well as that at which the machine did.
_SLACK_SECONDS = 10.0


class RankFile:
    """The file of one rank.

    Attributes:
        line: the last one that is whole.
        unreadable: lines that are none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._follower = Follower(path, _LAST_BYTES)
        self._heard = 0.0
        self.line: dict[str, Any] = {}
        self.unreadable = 0

    def look(self) -> None:
        """Read on."""
        before, is_first = self.line, not self.line
        for line in self._follower.new_lines():
            found = read_line(line)
            if found is not None and isinstance(found.get("time"), int | float):
                self.line = found
            else:
                self.unreadable += bool(line)
        if self.line is not before:
            # Another machine's clock may be wrong, but says all there is of what was written before we looked.
            late = max(0.0, time.time() - self.line["time"]) if is_first or self.is_here else 0.0
            self._heard = time.monotonic() - late

    @property
    def age(self) -> float:
        """Seconds since the rank wrote."""
        return time.monotonic() - self._heard

    @property
    def is_here(self) -> bool:
        """Whether it is a rank of this machine."""
        return bool(self.line.get("host") == socket.gethostname())

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended."""
        return self.is_here and not _is_alive(int(self.line["pid"]), float(self.line["time"]))


class RankFiles:
    """The files of all ranks of a run.

    Args:
        folder: where they are, or will be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, RankFile] = {}

    def look(self) -> None:
        """Read on in all of them, new ones too."""
        for path in self._folder.glob("rank-*.jsonl"):
            name = _NAME.fullmatch(path.name)
            if name and int(name[1]) not in self._files:
                self._files[int(name[1])] = RankFile(path)
        for file in self._files.values():
            file.look()

    @property
    def unreadable(self) -> int:
        """Lines that are none of ours."""
        return sum(file.unreadable for file in self._files.values())

    @property
    def have_told(self) -> bool:
        """Whether any rank has told anything."""
        return any(file.line for file in self._files.values())

    @property
    def are_fresh(self) -> bool:
        """Whether any rank was heard of within the last seconds, and lives as far as can be told."""
        return any(file.line and file.age < SILENT_SECONDS and not file.is_gone for file in self._files.values())

    def time_of(self, rank: int) -> float:
        """When a rank wrote last, by its own clock; 0 where it has not."""
        return float(self._files[rank].line.get("time", 0.0)) if rank in self._files else 0.0

    def rows(self, processes: int | None, since: float, *, is_expected: bool) -> list[RankRow]:
        """One row a rank.

        Args:
            processes: how many ranks the newest part of the run has, None where that is not known yet.
            since: when it began; a rank with a higher number that wrote before is one of an earlier part.
            is_expected: ranks are to write; without it none is silent or gone.
        """
        numbers = set(range(processes or 0))
        for rank, file in self._files.items():
            if file.line and (processes is None or file.line["time"] > since):
                numbers.add(rank)
        return [self._row(rank, is_expected=is_expected) for rank in sorted(numbers)]

    def _row(self, rank: int, *, is_expected: bool) -> RankRow:
        file = self._files.get(rank)
        if file is None or not file.line:
            return RankRow(rank, "not heard", None, {})
        sign: Sign = "heard"
        if is_expected and file.is_gone:
            sign = "gone"
        elif is_expected and file.age >= SILENT_SECONDS:
            sign = "silent"
        return RankRow(rank, sign, round(file.age, 1), file.line)


def _is_alive(number: int, wrote: float) -> bool:
    """Whether the process that wrote a line at `wrote` is there still, and no later one has its number."""
    try:
        process = psutil.Process(number)
        is_same = process.create_time() <= wrote + _SLACK_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
