"""Requirements that every fault of the surroundings of a run must meet, and its row on the page of faults."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.shared_memory import abandoned, require_none_left
from helpers.system import Done, Running, until

REPORT_LINES = 60
REPORT_BYTES = 8192
END_SECONDS = 10

# Called with fault and observed result.
RecordFault = Callable[[str, str], None]


def require_bounded(report: str) -> None:
    """Require a report of at most 60 lines and 8 kB without control characters; `report` is the standard error."""
    assert len(report.splitlines()) <= REPORT_LINES, report
    assert len(report.encode(errors="surrogateescape")) <= REPORT_BYTES, report
    control = {character for character in report if not character.isprintable() and character != "\n"}
    assert not control, f"{control!r} in {report!r}"


def require_single_report(done: Done, code: int) -> str:
    """Require the exit code and exactly one bounded report without a traceback of the launcher; return its title."""
    assert done.code == code, done.err
    require_bounded(done.err)
    titles = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(titles) == 1, done.err
    return titles[0].removeprefix("error: ")


def temporary_folder(path: Path) -> dict[str, str]:
    """Return the environment variable of an empty temporary folder, `t` below `path`, for `nothing_left_behind`.

    The folder has a short path, because the kernel limits the paths of sockets in it.
    """
    folder = path.parent / f"t{zlib.crc32(path.name.encode())}"
    folder.mkdir(exist_ok=True)
    (path / "t").symlink_to(folder)
    return {"TMPDIR": str(folder)}


def temporary_files(folder: Path) -> list[Path]:
    """Return what is left in a temporary folder, without the folder of torch's compiler, which its import creates."""
    return [path for path in folder.rglob("*") if "/torchinductor_" not in str(path)]


@contextmanager
def nothing_left_behind(running: Running, path: Path) -> Iterator[None]:
    """Require, after the block, that no process, shared memory or temporary file of the command remains."""
    before = abandoned()
    yield
    until(lambda: not running.processes(), "no process is left", END_SECONDS, instead=running.processes)
    require_none_left(before)
    assert not (files := temporary_files(path / "t")), files


def wait_for_end(running: Running, fault_time: float) -> Done:
    """Return the result of a command that must end within 10 s of the fault at `fault_time` (`time.monotonic()`)."""
    done = running.wait(END_SECONDS + 50)
    seconds = time.monotonic() - fault_time
    assert seconds < END_SECONDS, f"ended {seconds:.1f} s after the fault:\n{done.err}"
    return done
